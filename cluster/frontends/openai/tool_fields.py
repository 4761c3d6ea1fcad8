"""The fields of a chat about tools, by OpenAI's names."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, FailFast, Field, Tag, model_validator
from typing_extensions import TypeAliasType

from tandem.cluster.frontends.openai.body_object import BodyObject
from tandem.cluster.frontends.openai.guided_fields import COMPACT, with_options
from tandem.cluster.text.parsers.output_parser import Calls
from tandem.workers.sampling.schema_references import with_pointers

MAX_TOOLS = 128
MAX_TOOLS_TEXT = 1 << 18  # characters of all tools as JSON
MAX_CALLS = 1024  # in a message
NAME = r"^[a-zA-Z0-9_.-]{1,128}$"
NAME_WORDS = "a text of 1 to 128 letters, digits, _, . and -"
ANY_OBJECT = {"type": "object"}
SHAPES = frozenset({"type", "$ref", "$dynamicRef", "$recursiveRef", "anyOf", "oneOf", "allOf", "enum", "const"})
"""Keywords that may say which type a value has."""


class FunctionCall(BodyObject):
    """A call that the model made. arguments: JSON, as the model wrote it."""

    refused = frozenset()

    name: str = Field(description="text")
    arguments: str = Field(default="{}", description="the text of a JSON object")


class ToolCall(BodyObject):
    """A call of an earlier answer."""

    refused = frozenset()

    id: str = Field(default="", description="text")
    type: Literal["function"] = Field(default="function", description="'function'")
    function: FunctionCall = Field(description="an object with name and arguments")


ToolCalls = TypeAliasType("ToolCalls", Annotated[list[ToolCall], FailFast(), Field(max_length=MAX_CALLS)])


class Function(BodyObject):
    """A function that the model may call. A forced call follows the parameters, whatever strict says."""

    refused = frozenset()

    name: str = Field(pattern=NAME, description=NAME_WORDS)
    description: str | None = Field(default=None, description="text")
    parameters: dict[str, Any] | None = Field(default=None, description="a JSON schema, as an object")
    strict: bool | None = Field(default=None, description="true or false")


class Tool(BodyObject):
    refused = frozenset()

    type: Literal["function"] = Field(default="function", description="'function'")
    function: Function = Field(description="an object with name, description and parameters")


Tools = TypeAliasType("Tools", Annotated[list[Tool], FailFast(), Field(max_length=MAX_TOOLS)])


class NamedFunction(BodyObject):
    name: str = Field(description=NAME_WORDS)


class NamedTool(BodyObject):
    """A function that must be called."""

    type: Literal["function"] = Field(default="function", description="'function'")
    function: NamedFunction = Field(description="an object with name")


Word = Annotated[Literal["none", "auto", "required"], Tag("a word")]
ToolChoice = Annotated[
    Word | Annotated[NamedTool, Tag("a name")],
    Discriminator(lambda value: "a name" if isinstance(value, dict | NamedTool) else "a word"),
]


class ToolFields(BodyObject):
    """tools and what the model is to do with them."""

    tools: Tools | None = Field(
        default=None, description=f"a list of at most {MAX_TOOLS} objects with type 'function' and function"
    )
    tool_choice: ToolChoice | None = Field(
        default=None, description="'none', 'auto', 'required' or an object with type 'function' and function.name"
    )
    parallel_tool_calls: bool = Field(default=True, description="true or false")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        names = [tool.function.name for tool in self.tools or ()]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"tools has {twice!r} twice; each name may occur once")
        choice = self.tool_choice
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            known = ", ".join(names[:16]) or "none"
            raise ValueError(f"tool_choice names {choice.function.name!r:.80}; tools has {known}")
        if choice == "required" and not names:
            raise ValueError("tool_choice is 'required'; without tools it must be 'none' or 'auto'")
        if (size := len(self.template_tools)) > MAX_TOOLS_TEXT:
            raise ValueError(f"tools has {size} characters; it may have at most {MAX_TOOLS_TEXT}")
        return self

    @property
    def template_tools(self) -> str:
        """The tools for the chat template, as JSON. Empty if it shows none."""
        if not self.tools or self.tool_choice == "none":
            return ""
        return json.dumps([tool.model_dump(exclude_none=True) for tool in self.tools])

    @property
    def calls(self) -> Calls | None:
        """Returns the calls that a model may make; None if it may call no tool."""
        if not self.tools or self.tool_choice == "none":
            return None
        schemas = {tool.function.name: tool.function.parameters or ANY_OBJECT for tool in self.tools}
        named = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else ""
        most = None if self.parallel_tool_calls else 1
        return Calls(schemas, required=self.tool_choice == "required", named=named, most=most)

    @property
    def tool_guide(self) -> dict[str, Any] | None:
        """The schema that a forced call follows, as SamplingParams.guided of build_request()."""
        calls = self.calls
        if calls is None or not calls.forced or (calls.named and calls.named not in calls.schemas):
            return None
        return {"json_schema": json.dumps(forced_schema(calls))}


def forced_schema(calls: Calls) -> dict[str, Any]:
    """Returns the JSON schema of what is generated: one tool's arguments, or a list of calls. It is spaced as templates
    show calls: with more spaces allowed, a model could write spaces alone."""
    if calls.named:
        return with_options(_arguments(calls.schemas[calls.named], "#"), COMPACT)
    roots = {name: f"#/$defs/{number}" for number, name in enumerate(calls.schemas)}
    limit = {} if calls.most is None else {"maxItems": calls.most}
    listed = {
        "type": "array",
        "minItems": 1,
        **limit,
        "items": {"anyOf": [_call_schema(name, root) for name, root in roots.items()]},
        "$defs": {
            str(number): _arguments(calls.schemas[name], root) for number, (name, root) in enumerate(roots.items())
        },
    }
    return with_options(listed, COMPACT)


def _call_schema(name: str, parameters: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": {"$ref": parameters}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _arguments(parameters: Mapping[str, Any], root: str) -> dict[str, Any]:
    """The schema of a tool's parameters where its pointer is root. Arguments are an object, where it says nothing."""
    says = not SHAPES.isdisjoint(parameters)
    return with_pointers(parameters if says else {**ANY_OBJECT, **parameters}, root)
