"""The fields of a body that say what its output follows, by OpenAI's, vLLM's and SGLang's names."""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from pydantic import FailFast, Field, model_validator
from typing_extensions import TypeAliasType

from tandem.cluster.frontends.openai.body_object import BodyObject
from tandem.cluster.frontends.openai.sampling_fields import MAX_LISTED
from tandem.workers.sampling.closed_schema import without_others

ANY_OBJECT = '{"type": "object"}'
COMPACT: Mapping[str, Any] = MappingProxyType(
    {"whitespace_flexible": False, "whitespace_pattern": None, "item_separator": ", ", "key_separator": ": "}
)
"""llguidance's options of JSON as Python's json.dumps, and so a chat template, writes it."""
SCHEMA = "a JSON schema: an object, or its text"
Schema = dict[str, Any] | str
Choice = TypeAliasType("Choice", Annotated[list[str], FailFast(), Field(min_length=1, max_length=MAX_LISTED)])


class JsonSchema(BodyObject):
    """response_format.json_schema. The output always follows the schema, whatever strict says."""

    refused = frozenset()

    name: str = Field(default="", description="text")
    strict: bool = Field(default=True, description="true or false")
    held: dict[str, Any] = Field(alias="schema", description="a JSON schema, as an object")


class ResponseFormat(BodyObject):
    type: Literal["text", "json_object", "json_schema"] = Field(description="'text', 'json_object' or 'json_schema'")
    json_schema: JsonSchema | None = Field(default=None, description="an object with name and schema")

    @model_validator(mode="after")
    def _schema_of_its_type(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("needs json_schema with type 'json_schema', and takes it with no other type")
        return self


class StructuredOutputs(BodyObject):
    """vLLM's newer form of the fields of GuidedFields."""

    json_schema: Schema | None = Field(default=None, alias="json", description=SCHEMA)
    regex: str | None = Field(default=None, description="text")
    choice: Choice | None = Field(default=None, description=f"a list of 1 to {MAX_LISTED} texts")
    grammar: str | None = Field(default=None, description="text")
    json_object: bool = Field(default=False, description="true or false")
    disable_any_whitespace: bool = Field(default=False, description="true or false")
    whitespace_pattern: str | None = Field(default=None, description="a regular expression")
    disable_additional_properties: bool = Field(default=False, description="true or false")

    @model_validator(mode="after")
    def _one_spacing(self) -> Self:
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise ValueError("has whitespace_pattern and disable_any_whitespace: true; set only one")
        return self

    @property
    def guides(self) -> list[dict[str, Any]]:
        """Returns values for SamplingParams.guided of build_request(). Only JSON has fields for spaces and keys."""
        kinds = {"regex": self.regex, "choice": self.choice, "grammar": self.grammar}
        schemas = (_text(self.json_schema), ANY_OBJECT if self.json_object else None)
        return [{kind: held} for kind, held in kinds.items() if held is not None] + [
            {"json_schema": self._as_asked(held)} for held in schemas if held is not None
        ]

    def _as_asked(self, text: str) -> str:
        options = COMPACT if self.disable_any_whitespace else _pattern(self.whitespace_pattern)
        return _changed(text, options, closes=self.disable_additional_properties)


class GuidedFields(BodyObject):
    """The fields that say what the output follows. At most one may be set."""

    response_format: ResponseFormat | None = Field(default=None, description="an object with type")
    structured_outputs: StructuredOutputs | None = Field(
        default=None, description="an object with json, regex, choice, grammar or json_object"
    )
    guided_json: Schema | None = Field(default=None, description=SCHEMA)
    guided_regex: str | None = Field(default=None, description="text")
    guided_choice: Choice | None = Field(default=None, description=f"a list of 1 to {MAX_LISTED} texts")
    guided_grammar: str | None = Field(default=None, description="text")
    guided_whitespace_pattern: str | None = Field(default=None, description="a regular expression")
    json_schema: Schema | None = Field(default=None, description=SCHEMA)
    regex: str | None = Field(default=None, description="text")
    ebnf: str | None = Field(default=None, description="text")

    @model_validator(mode="after")
    def _one_guide(self) -> Self:
        names = [name for name, _ in self._guides()]
        if len(names) > 1:
            raise ValueError(f"{names[1]} and {names[0]} are both set; set only one")
        return self

    @property
    def guided(self) -> dict[str, Any] | None:
        """The value for SamplingParams.guided of build_request()."""
        guides = self._guides()
        return guides[0][1] if guides else None

    @property
    def guide(self) -> str:
        """Returns the name of the field that is set."""
        return self._guides()[0][0]

    def _guides(self) -> list[tuple[str, dict[str, Any]]]:
        found: list[tuple[str, dict[str, Any]]] = []
        form, newer = self.response_format, self.structured_outputs
        if form is not None and form.type == "json_object":
            found.append(("response_format", self._json(ANY_OBJECT)))
        elif form is not None and form.json_schema is not None:
            found.append(("response_format", self._json(json.dumps(form.json_schema.held))))
        schemas = {"guided_json": _text(self.guided_json), "json_schema": _text(self.json_schema)}
        found += [(name, self._json(text)) for name, text in schemas.items() if text is not None]
        others: dict[str, tuple[str, Any]] = {
            "guided_regex": ("regex", self.guided_regex),
            "guided_choice": ("choice", self.guided_choice),
            "guided_grammar": ("grammar", self.guided_grammar),
            "regex": ("regex", self.regex),
            "ebnf": ("grammar", self.ebnf),
        }
        found += [(name, {kind: held}) for name, (kind, held) in others.items() if held is not None]
        return found + [("structured_outputs", guide) for guide in (newer.guides if newer is not None else ())]

    def _json(self, text: str) -> dict[str, Any]:
        return {"json_schema": _changed(text, _pattern(self.guided_whitespace_pattern))}


def with_options(schema: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema with llguidance's options of JSON, before its own options."""
    own = schema.get("x-guidance")
    return {**schema, "x-guidance": {**(own if isinstance(own, dict) else {}), **options}}


def _text(schema: Schema | None) -> str | None:
    return json.dumps(schema) if isinstance(schema, dict) else schema


def _pattern(pattern: str | None) -> Mapping[str, Any]:
    return {} if pattern is None else {"whitespace_pattern": pattern}


def _changed(text: str, options: Mapping[str, Any], *, closes: bool = False) -> str:
    """Returns a schema with these options, and as without_others() makes it if it closes. Other values stay: the
    grammar's compiler says what is wrong."""
    if not options and not closes:
        return text
    try:
        schema = json.loads(text)
        schema = {} if schema is True else schema
        schema = without_others(schema) if closes else schema
        return json.dumps(with_options(schema, options)) if isinstance(schema, dict) else text
    except (ValueError, RecursionError):
        return text
