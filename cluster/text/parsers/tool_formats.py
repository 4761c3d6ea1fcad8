"""How models write tool calls: a parser for each format.

A parser is a generator over a Source, which gives what it finds to Parts. Text that turns out to be no call is content.
"""

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tandem.cluster.text.parsers.parts import Parts
from tandem.cluster.text.parsers.source import Malformed, Source, Waiting, nowhere

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each tool's parameters, by the tool's name."""

Parser = Callable[[Source, Parts, Schemas], Waiting[None]]
NAME = re.compile(r"[\w.:/-]{1,256}")
CALLS = "<｜tool▁calls▁begin｜>"
CALL = "<｜tool▁call▁begin｜>"
CALL_NAME = "<｜tool▁sep｜>"
CALL_END = "<｜tool▁call▁end｜>"
CALLS_END = "<｜tool▁calls▁end｜>"


def plain(source: Source, parts: Parts, schemas: Schemas) -> Waiting[None]:
    """No calls: all is content."""
    yield from source.upto((), parts.content)


def tagged(source: Source, parts: Parts, schemas: Schemas) -> Waiting[None]:
    """<tool_call> … </tool_call> around JSON (Hermes, Qwen), or around XML (Qwen3-Coder, GLM)."""
    while (yield from source.upto(("<tool_call>",), parts.content)) is not None:
        yield from _attempt(source, parts, "<tool_call>", _tagged_call(source, parts, schemas))


def _tagged_call(source: Source, parts: Parts, schemas: Schemas) -> Waiting[None]:
    yield from source.spaces()
    first = yield from source.peek()
    if first == "{":
        yield from _call(source, parts)
    elif (yield from source.starts("<function=")) is not None:
        yield from _function(source, parts, schemas)
    else:
        yield from _keys_and_values(source, parts, schemas)
    yield from source.need("</tool_call>")


def json_at_start(source: Source, parts: Parts, schemas: Schemas) -> Waiting[None]:
    """The answer is one JSON object a call, or several with semicolons between them (Llama 3)."""
    yield from source.spaces()
    yield from source.starts("<|python_tag|>")
    while (yield from source.peek()) == "{":
        if not (yield from _attempt(source, parts, "", _call(source, parts))):
            break
        yield from source.spaces()
        yield from source.starts(";")
        yield from source.spaces()
    yield from source.upto((), parts.content)


def bracketed(*marks: str) -> Parser:
    """A mark, and behind it a list of calls, or a call's name and its arguments (Mistral, Phi 4)."""

    def parse(source: Source, parts: Parts, schemas: Schemas) -> Waiting[None]:
        while (mark := (yield from source.upto(marks, parts.content))) is not None:
            yield from _attempt(source, parts, mark, _list_or_named(source, parts))

    return parse


def _list_or_named(source: Source, parts: Parts) -> Waiting[None]:
    yield from source.spaces()
    if (yield from source.peek()) == "[":
        yield from calls_of_list(source, parts)
    else:
        yield from _named(source, parts)


def deepseek(source: Source, parts: Parts, schemas: Schemas) -> Waiting[None]:
    """Marks of DeepSeek V3, R1 and V3.1, which differ in what stands before and behind the arguments."""
    while (mark := (yield from source.upto((CALLS, CALL, CALLS_END), parts.content))) is not None:
        if mark == CALL:
            yield from _attempt(source, parts, CALL, _deepseek_call(source, parts))


def _deepseek_call(source: Source, parts: Parts) -> Waiting[None]:
    """function<sep>NAME and a block of JSON, or NAME<sep> and JSON."""
    name = yield from _text_before(source, (CALL_NAME,))
    yield from source.spaces()
    if (yield from source.peek()) != "{":
        name = yield from _text_before(source, ("\n",))
        yield from source.need("```json")
    begin_call(parts, name)
    yield from source.value(parts.arguments)
    yield from source.upto((CALL_END,), nowhere)


def pythonic(source: Source, parts: Parts, schemas: Schemas) -> Waiting[None]:
    """The answer is a Python list of calls with keyword arguments (Llama 4). It comes when all is there."""
    yield from source.spaces()
    if (yield from source.peek()) != "[":
        yield from source.upto((), parts.content)
        return
    texts: list[str] = []
    yield from source.upto((), texts.append)
    text = "".join(texts)
    try:
        calls = [_python_call(node) for node in _list_of(text)]
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        parts.content(text)
        return
    for name, arguments in calls:
        parts.call(name)
        parts.arguments(arguments)


@dataclass(frozen=True)
class ToolFormat:
    """marks: texts of its own that the answer has; where they are special tokens, the text must keep those."""

    parse: Parser
    marks: tuple[str, ...] = ()
    id_length: int = 24  # characters of a call's id; templates of Mistral's take no other


FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {
        "tagged": ToolFormat(tagged, ("<tool_call>", "</tool_call>")),
        "llama3_json": ToolFormat(json_at_start, ("<|python_tag|>",)),
        "mistral": ToolFormat(bracketed("[TOOL_CALLS]"), ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), 9),
        "deepseek": ToolFormat(deepseek, (CALLS, CALL, CALL_NAME, CALL_END, CALLS_END)),
        "phi4_mini": ToolFormat(bracketed("<|tool_call|>", "functools"), ("<|tool_call|>", "<|/tool_call|>")),
        "pythonic": ToolFormat(pythonic),
    }
)
"""By the names that gateway.tool_parser takes."""


def calls_of_list(source: Source, parts: Parts) -> Waiting[None]:
    """A JSON list of calls. Malformed when it is none."""
    yield from source.need("[")
    yield from source.spaces()
    if (yield from source.starts("]")):
        return
    while True:
        yield from _call(source, parts)
        yield from source.spaces()
        if (yield from source.starts(",", "]")) != ",":
            return


def begin_call(parts: Parts, name: str) -> None:
    """Begins a call. Malformed for what is no name."""
    name = name.strip()
    if not NAME.fullmatch(name):
        raise Malformed("name")
    parts.call(name)


def _call(source: Source, parts: Parts) -> Waiting[None]:
    """A JSON object with name, and arguments or parameters. These stream where the name comes first."""
    yield from source.need("{")
    name, early, begun = "", "", False
    while True:
        yield from source.spaces()
        key = yield from source.string()
        yield from source.need(":")
        if key == "name":
            name = yield from source.string()
        elif key in ("arguments", "parameters") and name:
            begin_call(parts, name)
            begun = True
            yield from _arguments(source, parts.arguments)
        elif key in ("arguments", "parameters"):
            kept: list[str] = []
            yield from _arguments(source, kept.append)
            early = "".join(kept)
        else:
            yield from source.value(nowhere)
        yield from source.spaces()
        end = yield from source.starts(",", "}")
        if end is None:
            raise Malformed("}")
        if end == "}":
            break
    if not begun:
        begin_call(parts, name)
        parts.arguments(early or "{}")


def _arguments(source: Source, sink: Callable[[str], None]) -> Waiting[None]:
    """An object, or the text of one as a JSON string."""
    yield from source.spaces()
    if (yield from source.peek()) == '"':
        sink((yield from source.string()))
    else:
        yield from source.value(sink)


def _named(source: Source, parts: Parts) -> Waiting[None]:
    """A name, perhaps marks of Mistral's, and the arguments."""
    names: list[str] = []
    while True:
        first = yield from source.peek()
        if first == "":
            raise Malformed("broken off")
        if first == "{":
            break
        if first == "[":
            mark = yield from source.starts("[ARGS]", "[CALL_ID]")
            if mark is None:
                raise Malformed("[ARGS]")
            if mark == "[CALL_ID]":
                yield from source.upto(("[ARGS]",), nowhere)
            break
        names.append((yield from _character(source)))
    begin_call(parts, "".join(names))
    yield from source.value(parts.arguments)


def _character(source: Source) -> Waiting[str]:
    first = yield from source.peek()
    yield from source.starts(first)
    return first


def _function(source: Source, parts: Parts, schemas: Schemas) -> Waiting[None]:
    """NAME> and parameters as XML, as Qwen3-Coder writes them."""
    name = yield from _text_before(source, (">",))
    values: dict[str, Any] = {}
    while True:
        yield from source.spaces()
        mark = yield from source.starts("<parameter=", "</function>")
        if mark is None:
            raise Malformed("<parameter=")
        if mark == "</function>":
            break
        key = yield from _text_before(source, (">",))
        text = yield from _text_before(source, ("</parameter>",))
        values[key] = _typed(text.removeprefix("\n").removesuffix("\n"), _type_of(schemas, name, key))
    begin_call(parts, name)
    parts.arguments(json.dumps(values, ensure_ascii=False))


def _keys_and_values(source: Source, parts: Parts, schemas: Schemas) -> Waiting[None]:
    """NAME and pairs as XML, as GLM 4.5 writes them."""
    names: list[str] = []
    while (yield from source.peek()) not in ("<", ""):
        names.append((yield from _character(source)))
    name = "".join(names).strip()
    values: dict[str, Any] = {}
    while (yield from source.starts("<arg_key>")) is not None:
        key = yield from _text_before(source, ("</arg_key>",))
        yield from source.need("<arg_value>")
        values[key] = _typed((yield from _text_before(source, ("</arg_value>",))), _type_of(schemas, name, key))
        yield from source.spaces()
    begin_call(parts, name)
    parts.arguments(json.dumps(values, ensure_ascii=False))


def _text_before(source: Source, marks: tuple[str, ...]) -> Waiting[str]:
    """The text before a mark, which must come."""
    kept: list[str] = []
    if (yield from source.upto(marks, kept.append)) is None:
        raise Malformed(marks[0])
    return "".join(kept)


def _type_of(schemas: Schemas, name: str, key: str) -> object:
    """The type that the tool's schema gives to a parameter, or None."""
    properties = schemas.get(name, {}).get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    return schema.get("type") if isinstance(schema, Mapping) else None


def _typed(text: str, kind: object) -> Any:
    """A text stays one where the schema says so; else it is JSON, where it can be."""
    if kind == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(text, text)


def _attempt(source: Source, parts: Parts, mark: str, call: Waiting[None]) -> Waiting[bool]:
    """Whether a call could be read. If not, the mark and what was read are content, unless a call had begun: then its
    arguments are what came."""
    source.remember()
    before = parts.num_calls
    try:
        yield from call
    except Malformed:
        text = source.forget()
        if parts.num_calls == before:
            parts.content(mark + text)
        return False
    source.forget()
    return True


def _list_of(text: str) -> list[ast.expr]:
    tree = ast.parse(text.strip(), mode="eval").body
    if not isinstance(tree, ast.List) or not tree.elts:
        raise ValueError("no list of calls")
    return tree.elts


def _python_call(node: ast.expr) -> tuple[str, str]:
    """Name, and arguments as JSON."""
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call with keywords")
    values = {word.arg: ast.literal_eval(word.value) for word in node.keywords if word.arg is not None}
    return ast.unparse(node.func), json.dumps(values, ensure_ascii=False)
