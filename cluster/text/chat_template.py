"""Checkpoints' chat templates: jinja in a sandbox, with the names and filters of transformers."""

import datetime
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from tandem.cluster.text.template_sandbox import Sandbox
from tandem.workers.checkpoint.errors import InvalidTokenizer
from tandem.workers.checkpoint.tokenizer_files import DEFAULT, MAX_TEMPLATE_BYTES

RENDER_SECONDS = 2.0
MOST_SAID = 500  # characters of a template's error, which may repeat its input
MAX_INDENT = 64
GOES_ON = "\N{WORD JOINER}goes-on\N{WORD JOINER} "  # added after the message that an answer continues
TEMPLATE_FILE = "<template>"  # what jinja calls the code of a template that came as a string
FOR_TOOLS = "tool_use"  # the name of the template for requests with tools
CHOSEN = "chat_template"  # the variable that names a template


class ChatTemplateError(ValueError):
    """The template refused these messages, or failed on them; the text says why."""


class ChatTemplate:
    """A compiled template. special_tokens: its variables bos_token, eos_token and so on."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises InvalidTokenizer when the template does not compile."""
        if len(source) > MAX_TEMPLATE_BYTES:
            raise InvalidTokenizer(f"the chat template has {len(source)} characters; at most {MAX_TEMPLATE_BYTES} do")
        environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols])
        environment.add_filter("tojson", to_json)
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = strftime_now
        self.source = source
        self._environment = environment
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except RecursionError:
            raise InvalidTokenizer("the chat template does not compile: it is nested too deeply") from None
        except (TemplateError, SyntaxError, ValueError) as error:
            raise InvalidTokenizer(f"the chat template does not compile: {error!s:.{MOST_SAID}}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt for `messages` (each with role and content, perhaps tool_calls), up to the model's answer.

        The arguments of tool calls are JSON texts. Templates get them as objects. Anything else, such as a call that
        max_tokens has cut off, comes as a text. A template that fails on these gets texts only. If it fails again, it
        gets empty objects in their place. An empty text means an empty object. tools: functions that the model may
        call, in OpenAI's form. variables: further variables of the template. continue_final_message: the prompt ends in
        the last message. ChatTemplateError when the template refuses them, fails, or runs for more than RENDER_SECONDS.
        """
        turns = [dict(message) for message in messages]
        if continue_final_message and turns:
            turns[-1]["content"] += GOES_ON
        given = {"documents": None} | self._special_tokens | dict(variables or {})
        given |= {"tools": tools, "add_generation_prompt": add_generation_prompt}
        refusal = ChatTemplateError()
        for messages in _readings(turns):
            try:
                rendered = self._render(given | {"messages": messages})
            except ChatTemplateError as error:
                refusal = error
                continue
            return _before_mark(rendered) if continue_final_message else rendered
        raise refusal

    def _render(self, given: Mapping[str, Any]) -> str:
        try:
            with _time_limit(RENDER_SECONDS), self._environment.metered():
                return self._template.render(given)
        except Exception as error:  # a template may raise anything; the caller sees it as the template's refusal
            raise ChatTemplateError(f"the chat template refuses these messages: {error!s:.{MOST_SAID}}") from error


class ChatTemplates:
    """The templates of a checkpoint, by name. It may have none."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """special_tokens: see ChatTemplate. Raises InvalidTokenizer when one does not compile."""
        self._named = {name: ChatTemplate(source, special_tokens) for name, source in sources.items()}
        self.source = "\n".join(sources.values())

    def choose(self, tools: object = None, variables: Mapping[str, Any] | None = None) -> ChatTemplate:
        """Chooses as transformers does: the template that the variable `chat_template` names, else FOR_TOOLS if the
        request has tools and there is such a template, else DEFAULT. ChatTemplateError if the chosen template is
        missing."""
        if not self._named:
            raise ChatTemplateError("the checkpoint has no chat template; send text or token ids")
        chosen = (variables or {}).get(CHOSEN)
        if chosen is not None:
            self.check(chosen)
            return self._named[chosen]
        if tools is not None and FOR_TOOLS in self._named:
            return self._named[FOR_TOOLS]
        if DEFAULT not in self._named:
            raise ChatTemplateError(
                f"the checkpoint's chat templates are named {', '.join(self._named)}, and none is named {DEFAULT}; "
                f"name one of them as {CHOSEN} among the template's variables"
            )
        return self._named[DEFAULT]

    def check(self, chosen: object) -> None:
        """Raises ChatTemplateError unless it is the name of a template."""
        if not isinstance(chosen, str) or chosen not in self._named:
            names = ", ".join(self._named) or "none, for the checkpoint has no chat template"
            raise ChatTemplateError(f"template_kwargs.{CHOSEN} is {chosen!r:.80}; names of templates: {names}")


def _readings(turns: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yields the messages with the arguments of their calls in the forms that templates may want: see
    ChatTemplate.render()."""
    readings: list[list[dict[str, Any]]] = []
    for read in (_object_or_text, _text, _object):
        made = [_with_calls(turn, read) if turn.get("tool_calls") else turn for turn in turns]
        if made not in readings:
            readings.append(made)
            yield made


def _with_calls(turn: dict[str, Any], read: Callable[[str], Any]) -> dict[str, Any]:
    return turn | {"tool_calls": [_with(call, read) for call in turn["tool_calls"]]}


def _with(call: dict[str, Any], read: Callable[[str], Any]) -> dict[str, Any]:
    function = call["function"]
    return call | {"function": function | {"arguments": read(function.get("arguments") or "")}}


def _object_or_text(arguments: str) -> dict[str, Any] | str:
    text = _text(arguments)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _text(arguments: str) -> str:
    """Returns the arguments' text. Empty arguments become an empty object, because templates put them into JSON."""
    return "{}" if arguments.strip() in ("", "null") else arguments


def _object(arguments: str) -> dict[str, Any]:
    value = _object_or_text(arguments)
    return value if isinstance(value, dict) else {}


def _before_mark(rendered: str) -> str:
    """Returns the text before GOES_ON. A template that trims messages has trimmed the mark's last space."""
    begin = rendered.rfind(GOES_ON.rstrip())
    if begin < 0:
        raise ChatTemplateError("the chat template does not show the last message, so that none can continue it")
    before = rendered[:begin]
    return before if rendered.startswith(GOES_ON, begin) else before.rstrip()


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Ends the template that this thread renders with TimeoutError. A trace function checks the clock at each line."""
    deadline = time.monotonic() + seconds
    before = sys.gettrace()

    def at_each_line(frame: FrameType, event: str, argument: Any) -> Any:
        if time.monotonic() > deadline:
            raise TimeoutError(f"it runs for more than {seconds:g} s")
        return at_each_line

    def at_each_call(frame: FrameType, event: str, argument: Any) -> Any:
        if time.monotonic() > deadline:  # generators of filters
            raise TimeoutError(f"it runs for more than {seconds:g} s")
        return at_each_line if frame.f_code.co_filename == TEMPLATE_FILE else None

    sys.settrace(at_each_call)
    try:
        yield
    finally:
        sys.settrace(before)


class GenerationTag(Extension):
    """{% generation %} … {% endgeneration %}: it marks the model's text for training, and changes nothing here."""

    tags = {"generation"}  # noqa: RUF012  jinja declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def raise_exception(message: str) -> None:
    raise TemplateError(message)


def strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replaces jinja's own filter, which escapes HTML."""
    if isinstance(indent, int) and indent > MAX_INDENT:
        raise SecurityError(f"indent of tojson is {indent}; it must be at most {MAX_INDENT}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
