"""Calls whose arguments are bare texts between tags: <function=NAME> of Qwen3-Coder, <arg_key> of GLM.

Models leave tags out: the opener of a call, and the tags that close an argument, a function or a call. A tag that can
only come next then closes the open ones. Arguments come when all are there.
"""

import json
from typing import Any

from tandem.cluster.text.parsers.argument_types import properties, typed
from tandem.cluster.text.parsers.calls import Schemas, name_before, offered, whole_call
from tandem.cluster.text.parsers.parts import ParsedParts
from tandem.cluster.text.parsers.source import Malformed, Source, Waiting

TOOL, TOOL_END = "<tool_call>", "</tool_call>"
FUNCTION, PARAMETER, PARAMETER_END, FUNCTION_END = "<function=", "<parameter=", "</parameter>", "</function>"
FOLLOWING = (PARAMETER, FUNCTION_END, TOOL_END)  # the tags that may follow a parameter
BEHIND = {PARAMETER_END: FOLLOWING, FUNCTION_END: (TOOL_END, FUNCTION, TOOL)}  # else such a tag is part of a value
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


class _Arguments:
    """The arguments of one call."""

    def __init__(self, parameters: Any) -> None:
        self._parameters = parameters
        self._values: dict[str, Any] = {}
        self._cut = False

    def add(self, key: str, text: str, *, cut: bool) -> None:
        """cut: max_tokens has ended the text."""
        self._values[key] = text if cut else typed(text, self._parameters, key)
        self._cut = cut

    def text(self, *, cut: bool) -> str:
        """Returns JSON. A call that max_tokens has cut off has the beginning only, so that nobody takes it for
        whole."""
        whole = json.dumps(self._values, ensure_ascii=False)
        return whole.removesuffix('"}' if self._cut else "}") if cut else whole


def function_call(source: Source, parts: ParsedParts, schemas: Schemas) -> Waiting[None]:
    """Reads NAME>, parameters, and the end of function and call as far as the model writes them."""
    name = offered((yield from name_before(source, ">")), schemas)
    yield from source.starts(">")
    arguments = _Arguments(schemas[name])
    names = tuple(f"{PARAMETER}{key}>" for key in dict.fromkeys(properties(schemas[name])))
    yield from source.spaces()
    mark = yield from source.starts(*FOLLOWING)
    if mark is None and not source.ends(*FOLLOWING):
        raise Malformed(PARAMETER)
    key = ""
    while mark == PARAMETER:
        mark, key = yield from _parameter(source, arguments, names, key)
    whole_call(source, parts, name, arguments.text(cut=mark is None and source.cut))
    if mark == FUNCTION_END:
        yield from source.need(TOOL_END)


def _parameter(
    source: Source, arguments: _Arguments, names: tuple[str, ...], key: str
) -> Waiting[tuple[str | None, str]]:
    """Reads NAME>, unless it has been read, and a value. Returns the tag after it, None at the end of the text, and the
    next name if the tag has it.

    names: tags of all parameters. They end a value whose own end is missing, and so does any that begins a line.
    """
    if not key:
        try:
            key = yield from name_before(source, ">")
        except Malformed:
            if source.ends():
                return None, ""
            raise
        yield from source.starts(">")
    texts: list[str] = []
    marks = (PARAMETER_END, f"\n{PARAMETER}", *names, FUNCTION_END, TOOL_END)
    mark = yield from source.upto(marks, texts.append)
    while mark in BEHIND:
        spaces: list[str] = []
        yield from source.spaces(spaces.append)
        if (yield from source.sees(*BEHIND[mark])) is not None or source.ends(*BEHIND[mark]):
            break
        texts += [mark, *spaces]  # a part of the value
        mark = yield from source.upto(marks, texts.append)
    following = (yield from source.starts(*FOLLOWING)) if mark == PARAMETER_END else mark
    text = "".join(texts).removeprefix("\n").removesuffix("\n")
    arguments.add(key, text, cut=mark is None and source.cut)
    if following is None or following in FOLLOWING:
        return following, ""
    return PARAMETER, following.removeprefix("\n").removeprefix(PARAMETER).removesuffix(">")


def pairs_call(source: Source, parts: ParsedParts, schemas: Schemas) -> Waiting[None]:
    """Reads NAME and pairs of key and value, as GLM 4.5 writes them."""
    name = offered((yield from name_before(source, "<")), schemas)
    arguments = _Arguments(schemas[name])
    mark = yield from source.starts(KEY, TOOL_END)
    if mark is None and not source.ends(KEY, TOOL_END):
        raise Malformed(KEY)
    while mark == KEY:
        mark = yield from _pair(source, arguments)
    whole_call(source, parts, name, arguments.text(cut=mark is None and source.cut))


def _pair(source: Source, arguments: _Arguments) -> Waiting[str | None]:
    """Reads a key and its value, and the tag after them. None if the text ends otherwise."""
    keys: list[str] = []
    mark = yield from source.upto((KEY_END, VALUE, TOOL_END), keys.append)
    yield from source.spaces()
    if mark is None or mark == TOOL_END or (mark == KEY_END and (yield from source.starts(VALUE)) is None):
        return mark if mark == TOOL_END else None
    texts: list[str] = []
    mark = yield from source.upto((VALUE_END, KEY, TOOL_END), texts.append)
    arguments.add("".join(keys).strip(), "".join(texts), cut=mark is None and source.cut)
    if mark != VALUE_END:
        return mark
    yield from source.spaces()
    return (yield from source.starts(KEY, TOOL_END))
