"""A checkpoint whose files say things as strangers' files do, through every door.

The tokenizer has a token more than the model. The end token stands in tokenizer_config.json alone, and requests with
tools have a template of their own. config.json names no dtype, and YaRN stretches what it was trained on.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.client import Client
from tandem.cluster.errors import InvalidRequest
from tandem.cluster.tools.random_checkpoint import EOS, make_checkpoint
from tests.support.client_requests import complete
from tests.support.http_client import CHATS, COMPLETIONS, GREEDY, answer, post, refused
from tests.support.island import Island, running_island

VOCAB, END, PAD = 512, 1, "[PAD]"
MESSAGES, RESPONSES, TOKENIZE = "/v1/messages", "/v1/responses", "/tokenize"
SAID = [{"role": "user", "content": "Where is the page?"}]
PADDED = [{"role": "user", "content": f"Where is {PAD}?"}]
TOOL = {"name": "find", "parameters": {"type": "object", "properties": {"page": {"enum": [7]}}, "required": ["page"]}}
TOOLS = [{"type": "function", "function": TOOL}]
TURNS = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
TEMPLATES = [
    {"name": "default", "template": TURNS},
    {"name": "tool_use", "template": "{{ tools | tojson }}<tool_call>" + TURNS},
]


def change(path: Path, **fields: Any) -> None:
    kept = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in kept.items() if value is not None}))


@pytest.fixture(scope="module")
def island(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Island]:
    folder = tmp_path_factory.mktemp("files") / "model"
    make_checkpoint(folder, arch="qwen3", size="tiny", seed=1, dtype="bfloat16")
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    small = {"max_position_embeddings": 160, "rope_parameters": None, "rope_scaling": yarn}
    change(folder / "config.json", dtype=None, eos_token_id=None, **small)
    change(folder / "generation_config.json", eos_token_id=None)
    more = {"added_tokens_decoder": {str(VOCAB): {"content": PAD, "special": True}}, "chat_template": TEMPLATES}
    change(folder / "tokenizer_config.json", **more)
    with running_island(folder, {"gateway.http_port": 0}) as island:
        yield island


def test_the_model_is_what_weights_and_rope_make_of_it(island: Island) -> None:
    with Client(island.address) as client:
        info = client.model_info()
    assert (info.dtype, info.max_model_len, list(info.eos_token_ids)) == ("bfloat16", 512, [END])
    whole = answer(island.http, COMPLETIONS, prompt=[5] * 505, max_tokens=6, **GREEDY)
    assert whole["usage"]["completion_tokens"] == 6


def test_the_tokenizers_end_token_ends_an_answer(island: Island) -> None:
    bias = {"logit_bias": {str(END): 100}, "skip_special_tokens": False, "max_tokens": 4}
    for body, reason in (({}, "stop"), ({"ignore_eos": True}, "length")):
        (choice,) = answer(island.http, COMPLETIONS, prompt="a", **bias, **body)["choices"]
        assert (choice["finish_reason"], choice["text"]) == (reason, EOS * 4 if body else "")


@pytest.mark.parametrize(
    "guide",
    [{"structured_outputs": {"choice": ["yes", "no"]}}, {"structured_outputs": {"regex": rf"\[PAD\] ?{VOCAB}"}}],
)
def test_grammars_take_the_tokens_that_the_model_has(island: Island, guide: dict[str, Any]) -> None:
    (choice,) = answer(island.http, COMPLETIONS, prompt="a", max_tokens=60, **guide)["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["text"] in ("yes", "no", f"[PAD] {VOCAB}", f"[PAD]{VOCAB}")


def test_a_forced_call_is_made(island: Island) -> None:
    (choice,) = answer(
        island.http,
        CHATS,
        messages=SAID,
        tools=TOOLS,
        tool_choice="required",
        max_tokens=300,
        parallel_tool_calls=False,
    )["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("find", {"page": 7})


LENGTH = {RESPONSES: "max_output_tokens"}
DOORS: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"prompt": f"a{PAD}"}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", f"a{PAD}"]}, "prompt"),
    (COMPLETIONS, {"prompt": [5, VOCAB]}, "prompt"),
    (COMPLETIONS, {"prompt": "a", "bad_words": [PAD]}, "bad_words"),
    (CHATS, {"messages": PADDED}, "messages"),
    (CHATS, {"messages": SAID, "tools": [{"type": "function", "function": TOOL | {"description": PAD}}]}, "messages"),
    (RESPONSES, {"input": f"a{PAD}"}, "input"),
    (RESPONSES, {"input": "a", "instructions": PAD}, "input"),
    (MESSAGES, {"messages": PADDED}, "messages"),
    (MESSAGES, {"messages": SAID, "system": PAD}, "messages"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "field"), DOORS)
def test_a_token_that_the_model_lacks_is_refused_by_name(
    island: Island, path: str, body: dict[str, Any], field: str, stream: bool
) -> None:
    response = post(island.http, path, {**body, LENGTH.get(path, "max_tokens"): 16, "stream": stream})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error.get("param", field) == field
    said = rf"{field}(\[\d\])? (has '\[PAD\]', which is token 512|is 512); the vocabulary has 512 entries, 0 … 511"
    assert re.fullmatch(said, error["message"])


def test_a_token_that_the_model_lacks_is_refused_over_grpc(island: Island) -> None:
    prompts: dict[str, Any] = {"text": f"a{PAD}", "chat": PADDED}
    for field, prompt in prompts.items():
        reason = rf"{field} has '\[PAD\]', which is token 512; the vocabulary has 512"
        with pytest.raises(InvalidRequest, match=reason):
            complete(island.address, prompt, max_tokens=2)


def test_requests_with_tools_have_their_template(island: Island) -> None:
    """This also holds if they may call a tool: that template shows how a call looks."""
    named = {"messages": SAID, "return_token_strs": True}
    plain, tools = (answer(island.http, TOKENIZE, **named, **more) for more in ({}, {"tools": TOOLS}))
    assert "".join(tools["token_strs"]) == json.dumps(TOOLS) + "<tool_call>" + "".join(plain["token_strs"])
    asked = {"messages": SAID, "max_tokens": 2}
    assert answer(island.http, CHATS, **asked)["usage"]["prompt_tokens"] == plain["count"]
    assert answer(island.http, CHATS, **asked, tools=TOOLS)["usage"]["prompt_tokens"] == tools["count"]


def test_a_request_names_its_template(island: Island) -> None:
    named = {"messages": SAID, "chat_template_kwargs": {"chat_template": "default"}, "max_tokens": 2}
    counts = [answer(island.http, CHATS, **named, **more)["usage"]["prompt_tokens"] for more in ({}, {"tools": TOOLS})]
    assert counts[0] == counts[1]
    named["chat_template_kwargs"]["chat_template"] = "{{ messages }}"
    error = refused(post(island.http, CHATS, named), 400)
    assert error["param"] == "chat_template_kwargs"
    assert error["message"] == (
        "chat_template_kwargs.chat_template is '{{ messages }}'; names of templates: default, tool_use"
    )
