"""Chat templates of checkpoints: jinja in a sandbox, with the names and filters that transformers gives them."""

import datetime
import json
from collections.abc import Mapping, Sequence

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tandem.workers.models.errors import InvalidTokenizer


class ChatTemplateError(ValueError):
    """The template refused these messages, or failed on them; the text says why."""


class ChatTemplate:
    """One compiled template; special_tokens are the variables bos_token, eos_token and so on."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises InvalidTokenizer when the template does not compile."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = to_json
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = strftime_now
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise InvalidTokenizer(f"the chat template does not compile: {error}") from None

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt for `messages` (each with role and content), up to where the model is to speak."""
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except Exception as error:  # a template may raise anything; for the caller all of it is the template's refusal
            raise ChatTemplateError(f"the chat template refuses these messages: {error}") from error


class GenerationTag(Extension):
    """{% generation %} … {% endgeneration %} marks what the model said, for training; here it changes nothing."""

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
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
