"""The fields of a body that say what its output follows, by OpenAI's, vLLM's and SGLang's names."""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import FailFast, Field, model_validator
from typing_extensions import TypeAliasType

from tandem.cluster.frontends.openai.part import Part
from tandem.cluster.frontends.openai.sampling_fields import MAX_LISTED

ANY_OBJECT = '{"type": "object"}'
SCHEMA = "a JSON schema: an object, or its text"
Schema = dict[str, Any] | str
Choice = TypeAliasType("Choice", Annotated[list[str], FailFast(), Field(min_length=1, max_length=MAX_LISTED)])


class JsonSchema(Part):
    """response_format.json_schema. The output always follows the schema, whatever strict says."""

    refused = frozenset()

    name: str = Field(default="", description="text")
    strict: bool = Field(default=True, description="true or false")
    held: dict[str, Any] = Field(alias="schema", description="a JSON schema, as an object")


class ResponseFormat(Part):
    type: Literal["text", "json_object", "json_schema"] = Field(description="'text', 'json_object' or 'json_schema'")
    json_schema: JsonSchema | None = Field(default=None, description="an object with name and schema")

    @model_validator(mode="after")
    def _schema_of_its_type(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("needs json_schema with type 'json_schema', and takes it with no other type")
        return self


class StructuredOutputs(Part):
    """vLLM's newer form of the fields of GuidedFields."""

    json_schema: Schema | None = Field(default=None, alias="json", description=SCHEMA)
    regex: str | None = Field(default=None, description="text")
    choice: Choice | None = Field(default=None, description=f"a list of 1 to {MAX_LISTED} texts")
    grammar: str | None = Field(default=None, description="text")
    json_object: bool = Field(default=False, description="true or false")


class GuidedFields(Part):
    """At most one of them says what the output follows."""

    response_format: ResponseFormat | None = Field(default=None, description="an object with type")
    structured_outputs: StructuredOutputs | None = Field(
        default=None, description="an object with json, regex, choice, grammar or json_object"
    )
    guided_json: Schema | None = Field(default=None, description=SCHEMA)
    guided_regex: str | None = Field(default=None, description="text")
    guided_choice: Choice | None = Field(default=None, description=f"a list of 1 to {MAX_LISTED} texts")
    guided_grammar: str | None = Field(default=None, description="text")
    json_schema: Schema | None = Field(default=None, description=SCHEMA)
    regex: str | None = Field(default=None, description="text")
    ebnf: str | None = Field(default=None, description="text")

    @model_validator(mode="after")
    def _one_guide(self) -> Self:
        names = [name for name, _ in self._guides()]
        if len(names) > 1:
            raise ValueError(f"{names[1]} is set beside {names[0]}; one of them is accepted")
        return self

    @property
    def guided(self) -> dict[str, Any] | None:
        """As SamplingParams.guided of build_request()."""
        guides = self._guides()
        return guides[0][1] if guides else None

    @property
    def guide(self) -> str:
        """The field that holds it."""
        return self._guides()[0][0]

    def _guides(self) -> list[tuple[str, dict[str, Any]]]:
        found: list[tuple[str, dict[str, Any]]] = []
        form, newer = self.response_format, self.structured_outputs
        if form is not None and form.type == "json_object":
            found.append(("response_format", {"json_schema": ANY_OBJECT}))
        elif form is not None and form.json_schema is not None:
            found.append(("response_format", {"json_schema": json.dumps(form.json_schema.held)}))
        given: dict[str, dict[str, Any]] = {
            "guided_json": {"json_schema": _text(self.guided_json)},
            "guided_regex": {"regex": self.guided_regex},
            "guided_choice": {"choice": self.guided_choice},
            "guided_grammar": {"grammar": self.guided_grammar},
            "json_schema": {"json_schema": _text(self.json_schema)},
            "regex": {"regex": self.regex},
            "ebnf": {"grammar": self.ebnf},
        }
        found += [(name, guide) for name, guide in given.items() if None not in guide.values()]
        if newer is not None:
            schema = ANY_OBJECT if newer.json_object else None
            kinds = {"regex": newer.regex, "choice": newer.choice, "grammar": newer.grammar}
            found += [("structured_outputs", {kind: held}) for kind, held in kinds.items() if held is not None]
            schemas = (_text(newer.json_schema), schema)
            found += [("structured_outputs", {"json_schema": held}) for held in schemas if held is not None]
        return found


def _text(schema: Schema | None) -> str | None:
    return json.dumps(schema) if isinstance(schema, dict) else schema
