"""A model that writes what a test says, with a chat template of reasoning and tool calls."""

import json
from pathlib import Path
from typing import Any

import httpx

from tandem.cluster.text.tokenizer import Tokenizer
from tandem.cluster.tools.random_checkpoint import make_checkpoint

EOS = 1
TEMPLATE = (
    "{% if tools %}Call with <tool_call>: {{ tools | tojson }}{{ '\\n' }}{% endif %}{% for message in messages %}"
    "{{ message.role }}: {{ message.content }}{% if message.reasoning_content %} ({{ message.reasoning_content }})"
    "{% endif %}{% for call in message.tool_calls %} {{ call.function.name }}={{ call.function.arguments.city }}"
    "{% endfor %}{% if message.tool_call_id %} for {{ message.tool_call_id }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% if think %}<think>{% endif %}{% endif %}{#</think>#}"
)
SAYS = '<think>Hm.</think>I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Łódź"}}\n</tool_call>'


class Script:
    """The tokens that the model writes next. Each request gets all of them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.begin("")

    def begin(self, text: str) -> None:
        self._tokens = [*self._tokenizer.encode(text, add_special_tokens=False), EOS]
        self._prompt = 0

    def say(self, sequence: list[int]) -> int:
        self._prompt = self._prompt or len(sequence)
        return self._tokens[min(len(sequence) - self._prompt, len(self._tokens) - 1)]


def make_scripted(folder: Path) -> Path:
    """A checkpoint with TEMPLATE."""
    make_checkpoint(folder, arch="llama", size="tiny", seed=1)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def named_events(response: httpx.Response) -> list[dict[str, Any]]:
    """Returns the events of a stream, and checks that they are named as their types."""
    assert response.status_code == 200, response.text
    events = []
    for block in response.text.rstrip("\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events
