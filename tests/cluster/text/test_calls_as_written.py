"""Calls as models write them: tags left out, arguments of several types, calls in the reasoning, and no calls."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.cluster.text.parsers.argument_types import typed
from tandem.cluster.text.parsers.output_parser import Calls, OutputParser
from tandem.cluster.text.parsers.parts import CallArguments, CallBegin, Content, ParsedPart, Reasoning
from tandem.cluster.text.parsers.reasoning import TAGS
from tandem.cluster.text.parsers.tool_formats import FORMATS

CALLS = Calls(
    {
        "find": {
            "type": "object",
            "properties": {
                "zip": {"type": "string"},
                "num": {"type": "integer"},
                "who": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
        },
        "now": {"type": "object"},
    }
)
FIND = ("find", {"zip": "02134", "num": 5})
NOW = ("now", {})
ALICE = '{"name": "Alice", "age": 30}'
SENT = '{"name": "Alice", "arguments": {"x": 1}}'
LISTED = '{"name": "find", "arguments": [1]}'
JSON_CALL = '{"name": "find", "arguments": {"zip": "02134", "num": 5}}'
TOOL = f"<tool_call>{JSON_CALL}</tool_call>"
BODY = "<parameter=zip>\n02134\n</parameter>\n<parameter=num>\n5\n"
XML = f"<function=find>\n{BODY}</parameter>\n</function>"
GLM = "find\n<arg_key>zip</arg_key>\n<arg_value>02134</arg_value>\n<arg_key>num</arg_key>\n<arg_value>5"
SEP, CALL, END = "<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
ALL, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"

Said = tuple[str, str, list[tuple[str, Any]]]  # reasoning, content and calls


def parser(form: str, *, tags: bool = False, opened: bool = False, calls: Calls | None = CALLS) -> OutputParser:
    return OutputParser(
        calls,
        FORMATS.get(form),
        TAGS["think"] if tags else None,
        opened=opened,
        speaks_harmony=form == "harmony",
    )


def said(made: OutputParser, pieces: list[str], *, cut: bool = False) -> tuple[str, str, list[tuple[str, str]]]:
    """Returns the joined texts of the parts, and the names of calls with the texts of their arguments."""
    parts: list[ParsedPart] = []
    for piece in pieces:
        parts += made.push(piece)
    parts += made.finish(cut=cut)
    texts = {Reasoning: "", Content: ""}
    calls: list[tuple[str, str]] = []
    for part in parts:
        if isinstance(part, CallBegin):
            calls.append((part.name, ""))
        elif isinstance(part, CallArguments):
            calls[part.index] = (calls[part.index][0], calls[part.index][1] + part.text)
        else:
            texts[type(part)] += part.text
    return texts[Reasoning], texts[Content], calls


def read(made: OutputParser, text: str) -> Said:
    reasoning, content, calls = said(made, [text])
    return reasoning, content, [(name, json.loads(arguments)) for name, arguments in calls]


NO_CALLS = [
    ("llama3_json", ALICE),
    ("llama3_json", '{"city": "Paris", "name": "x"}'),
    ("llama3_json", SENT),
    ("llama3_json", LISTED),
    ("llama3_json", '{"name": "now"}'),
    ("llama3_json", ' {"name": "find", "parameters": "5"} '),
    ("llama3_json", '{"arguments": {"a": 1}, "name": "Alice"}'),
    ("tagged", f"<tool_call>\n{SENT}\n</tool_call>"),
    ("tagged", f"I say <tool_call>{LISTED}</tool_call>."),
    ("tagged", "<tool_call>\n<function=other>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call> Yes."),
    ("tagged", "write <function=name> and <parameter=key>"),
    ("tagged", "<tool_call>other\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"),
    ("mistral", f"[TOOL_CALLS] [{SENT}]"),
    ("mistral", f"[TOOL_CALLS][{LISTED}]"),
    ("mistral", '[TOOL_CALLS]other{"a": 1}'),
    ("mistral", "[TOOL_CALLS]find[1]"),
    ("phi4_mini", f"functools[{SENT}]"),
    ("phi4_mini", "functools are tools"),
    ("deepseek", f"{ALL}{CALL}other{SEP}{{}}{END}"),
    ("deepseek", f"{CALL}find{SEP}\n```json\n[1]\n```{END}"),
    ("pythonic", "[other(a=1)]"),
    ("pythonic", "[find(a={1, 2})]"),
    ("pythonic", "[find(a=1e999)]"),
    ("pythonic", " [now(), other()]"),
    ("pythonic", "[find(**{})]"),
]


@pytest.mark.parametrize(("form", "text"), NO_CALLS)
def test_what_is_no_call_of_an_offered_tool_is_content(form: str, text: str) -> None:
    assert read(parser(form), text) == ("", text, [])


AS_WRITTEN: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    ("tagged", XML, "", [FIND]),
    ("tagged", f"I look.\n{XML}\n</tool_call>", "I look.", [FIND]),
    ("tagged", f"<tool_call>\n{XML}", "", [FIND]),
    ("tagged", f"<tool_call>\n<function=find>\n{BODY}</function>\n</tool_call>", "", [FIND]),
    ("tagged", f"<tool_call>\n<function=find>\n{BODY}</tool_call> Yes.", " Yes.", [FIND]),
    ("tagged", f"<function=find>\n{BODY}", "", [FIND]),
    ("tagged", "<function=find>\n<parameter=zip>\n02134\n<parameter=num>\n5\n</function>", "", [FIND]),
    ("tagged", "<function=find><parameter=zip>02134<parameter=num>5</function>", "", [FIND]),
    ("tagged", f"<tool_call>{XML}\n{XML}</tool_call>", "", [FIND, FIND]),
    ("tagged", "<function=now>\n</function>", "", [NOW]),
    ("tagged", "<tool_call>now</tool_call>", "", [NOW]),
    ("tagged", f"<tool_call>{GLM}</arg_value>\n</tool_call>", "", [FIND]),
    ("tagged", f"<tool_call>{GLM}\n</tool_call>".replace("</arg_value>\n<arg_key>", "<arg_key>"), "", [FIND]),
    ("tagged", f"<tool_call>{GLM}", "", [FIND]),
    ("tagged", f"<tool_call>\n{JSON_CALL}", "", [FIND]),
    ("tagged", f"<tool_call>\n{JSON_CALL}\n<tool_call>{JSON_CALL}</tool_call>", "", [FIND, FIND]),
    (
        "tagged",
        "<function=find><parameter=zip>\na </parameter> b\n</parameter>\n</function>",
        "",
        [("find", {"zip": "a </parameter> b"})],
    ),
    (
        "tagged",
        "<function=find><parameter=zip>\na </function> b\n</parameter>\n</function>",
        "",
        [("find", {"zip": "a </function> b"})],
    ),
    ("tagged", f"<function=find>\n{BODY}</function>\n<function=now></function> Yes.", " Yes.", [FIND, NOW]),
    ("llama3_json", f"{JSON_CALL}; {JSON_CALL}", "", [FIND, FIND]),
    ("llama3_json", f"{JSON_CALL}; {ALICE}", f"; {ALICE}", [FIND]),
    ("mistral", f"[TOOL_CALLS][{JSON_CALL}, {SENT}] Yes.", f", {SENT}] Yes.", [FIND]),
    ("deepseek", f"{CALL}find{SEP}{{}}{END}{CALL}other{SEP}{{}}{END}", f"{CALL}other{SEP}{{}}{END}", [("find", {})]),
    ("pythonic", "[find(who=null, num=5), now()]", "", [("find", {"who": None, "num": 5}), NOW]),
    ("harmony", "<|channel|>commentary to=functions.now<|message|><|call|>", "", [NOW]),
    ("harmony", "<|channel|>commentary to=functions.other<|message|>{}<|call|>", "{}", []),
    ("harmony", "<|channel|>commentary to=functions.now<|message|> [1]<|call|>", " [1]", []),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), AS_WRITTEN)
def test_calls_with_tags_left_out(form: str, text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    assert read(parser(form), text) == ("", content, calls)


IN_THOUGHT: list[tuple[str, str, Said]] = [
    ("tagged", f"I look.\n{TOOL}", ("I look.", "", [FIND])),
    ("tagged", f"I look.\n<tool_call>\n{XML}\n</tool_call>", ("I look.", "", [FIND])),
    ("tagged", f"I look.\n{XML}", ("I look.", "", [FIND])),
    ("tagged", f"I look.{TOOL}\n</think>\n\nDone.", ("I look.", "Done.", [FIND])),
    ("tagged", f"I look.{TOOL}{TOOL}", ("I look.", "", [FIND, FIND])),
    ("tagged", "Say <tool_call> or so.</think>Yes.", ("Say <tool_call> or so.", "Yes.", [])),
    ("tagged", f"Say <tool_call>{SENT}</tool_call> or so.", (f"Say <tool_call>{SENT}</tool_call> or so.", "", [])),
    ("tagged", f"Hm.</think>{TOOL}", ("Hm.", "", [FIND])),
    ("tagged", "<think>\nHm.</think>Yes.", ("Hm.", "Yes.", [])),
    ("mistral", f"I look.[TOOL_CALLS][{JSON_CALL}]", ("I look.", "", [FIND])),
    ("deepseek", f"I look.{ALL}{CALL}now{SEP}{{}}{END}{ALL_END}", ("I look.", "", [NOW])),
]


@pytest.mark.parametrize(("form", "text", "what"), IN_THOUGHT)
def test_a_call_ends_the_reasoning_that_it_stands_in(form: str, text: str, what: Said) -> None:
    assert read(parser(form, tags=True, opened=True), text) == what
    begun = text.removeprefix("<think>")
    assert read(parser(form, tags=True), f"<think>\n{begun}") == what


def test_without_tools_a_call_in_the_reasoning_is_reasoning() -> None:
    assert read(parser("tagged", tags=True, opened=True, calls=None), f"Hm. {TOOL}") == (f"Hm. {TOOL}", "", [])


def test_what_max_tokens_cuts_off_is_no_whole_json() -> None:
    """A client must not run `rm -rf /` where the model was about to write more."""
    for text, arguments in (
        ("<function=find>\n<parameter=zip>\n/tmp", '{"zip": "/tmp'),
        (f"<function=find>\n{BODY}</parameter>\n<para", '{"zip": "02134", "num": 5'),
        (f"<function=find>\n{BODY}</parameter>\n<parameter=who", '{"zip": "02134", "num": 5'),
        ("<tool_call>find\n<arg_key>zip</arg_key>\n<arg_value>/tmp", '{"zip": "/tmp'),
        ('<tool_call>{"name": "find", "arguments": {"zip": "/tmp', '{"zip": "/tmp'),
    ):
        assert said(parser("tagged"), [text], cut=True) == ("", "", [("find", arguments)])


PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "zip": {"type": "string"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        "code": {"type": ["string", "null"]},
        "ref": {"$ref": "#/$defs/T"},
        "all": {"allOf": [{"$ref": "#/$defs/T"}]},
        "one": {"oneOf": [{"type": "integer"}, {"type": "string"}]},
        "far": {"anyOf": [{"$ref": "#/$defs/a~1b"}, {"type": "null"}]},
        "loop": {"$ref": "#/$defs/loop"},
        "num": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "real": {"type": "number"},
        "flag": {"type": "boolean"},
        "level": {"enum": ["1", "2"]},
        "size": {"enum": [1, 2]},
        "same": {"const": "7"},
        "mixed": {"enum": ["a", 1, True, None, "2"]},
        "list": {"type": "array"},
        "object": {"type": ["object", "null"]},
        "any": {"description": "anything"},
        "old": {"type": "str"},
    },
    "$defs": {"T": {"type": "string"}, "a/b": {"type": "string"}, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}]}},
}
TYPED: list[tuple[str, str, Any]] = [
    ("zip", "02134", "02134"),
    ("zip", "null", "null"),
    ("zip", '{"a": 1}', '{"a": 1}'),
    ("maybe", "true", "true"),
    ("maybe", "null", None),
    ("maybe", "None", None),
    ("code", "123", "123"),
    ("code", "null", None),
    ("ref", "42", "42"),
    ("all", "42", "42"),
    ("one", "42", "42"),
    ("far", "42", "42"),
    ("loop", "42", "42"),
    ("num", "5", 5),
    ("num", "null", None),
    ("num", "five", "five"),
    ("real", "5.5", 5.5),
    ("real", "5.0", 5),
    ("real", "NaN", "NaN"),
    ("real", "1e999", "1e999"),
    ("flag", "True", True),
    ("flag", "false", False),
    ("level", "1", "1"),
    ("size", "1", 1),
    ("same", "7", "7"),
    ("mixed", "a", "a"),
    ("mixed", "1", 1),
    ("mixed", "2", "2"),
    ("mixed", "true", True),
    ("mixed", "null", None),
    ("mixed", "3", "3"),
    ("num", "007", 7),
    ("real", "-1", -1),
    ("list", '["a", 1]', ["a", 1]),
    ("list", "['a', None]", ["a", None]),
    ("list", "{1, 2}", "{1, 2}"),
    ("object", '{"a": [true]}', {"a": [True]}),
    ("object", '"{\\"a\\": 1}"', {"a": 1}),
    ("object", "null", None),
    ("any", "5", "5"),
    ("any", '{"a": 1}', {"a": 1}),
    ("unknown", "5", "5"),
    ("old", "5", "5"),
]


@pytest.mark.parametrize(("key", "text", "value"), TYPED)
def test_an_argument_has_the_type_that_its_schema_allows(key: str, text: str, value: Any) -> None:
    assert typed(text, PARAMETERS, key) == value
    assert type(typed(text, PARAMETERS, key)) is type(value)
    nested = {"$ref": "#/$defs/P", "$defs": PARAMETERS["$defs"] | {"P": PARAMETERS}}
    assert typed(text, nested, key) == value


PIECES = [
    *(text for _, text in NO_CALLS),
    *(text for _, text, *_ in AS_WRITTEN),
    *(text for _, text, _ in IN_THOUGHT),
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<function=find>", "<parameter=zip>", "</parameter>"),
    *("</function>", "<parameter=", "{", "}", "[", "]", '"', "\\", "\n", " ", "a", "find", ";", "[ARGS]", "<"),
]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.sampled_from([*FORMATS, "harmony"]),
    st.lists(st.sampled_from(PIECES), max_size=6),
    st.lists(st.integers(0, 400), max_size=12),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_any_cut_gives_the_same(
    form: str, pieces: list[str], cuts: list[int], tags: bool, opened: bool, cut: bool
) -> None:
    text = "".join(pieces)
    whole = said(parser(form, tags=tags, opened=opened), [text], cut=cut)
    ends = [0, *sorted(min(end, len(text)) for end in cuts), len(text)]
    for parts in ([text[a:b] for a, b in itertools.pairwise(ends)], list(text)):
        assert said(parser(form, tags=tags, opened=opened), parts, cut=cut) == whole
