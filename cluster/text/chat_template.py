"""Checkpoints' chat templates: jinja in a sandbox, with the names and filters of transformers."""

import datetime
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from tandem.cluster.text.template_sandbox import Sandbox
from tandem.workers.checkpoint.errors import InvalidTokenizer

RENDER_SECONDS = 2.0
MOST_SAID = 500  # characters of what a template says, which may repeat what it was given
MAX_TEMPLATE_BYTES = 1 << 20  # the longest published ones have 30 kB
MAX_INDENT = 64
TEMPLATE_FILE = "<template>"  # what jinja calls the code of a template that came as a string


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
        self._environment = environment
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except RecursionError:
            raise InvalidTokenizer("the chat template does not compile: it is nested too deeply") from None
        except (TemplateError, SyntaxError, ValueError) as error:
            raise InvalidTokenizer(f"the chat template does not compile: {error!s:.{MOST_SAID}}") from None

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt for `messages` (each with role and content), up to the model's answer.

        ChatTemplateError when the template refuses them, fails, or runs for more than RENDER_SECONDS.
        """
        try:
            with _time_limit(RENDER_SECONDS), self._environment.metered():
                return self._template.render(
                    messages=[dict(message) for message in messages],
                    tools=None,
                    documents=None,
                    add_generation_prompt=True,
                    **self._special_tokens,
                )
        except Exception as error:  # a template may raise anything; for the caller all of it is the template's refusal
            raise ChatTemplateError(f"the chat template refuses these messages: {error!s:.{MOST_SAID}}") from error


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Ends the template that this thread renders with TimeoutError. A trace function reads the clock at each line."""
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
    """Not jinja's own filter, which escapes HTML."""
    if isinstance(indent, int) and indent > MAX_INDENT:
        raise SecurityError(f"indent of tojson is {indent}; at most {MAX_INDENT} is accepted")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
