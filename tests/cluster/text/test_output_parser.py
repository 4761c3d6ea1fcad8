"""Parsers of reasoning and tool calls: what they find, however the text is cut."""

import json
import random
from dataclasses import dataclass
from typing import Any

import pytest
import tokenizers

from tandem.cluster.text.chat_template import ChatTemplates
from tandem.cluster.text.parsers.formats import Left, OutputFormats
from tandem.cluster.text.parsers.output_parser import Calls, OutputParser
from tandem.cluster.text.parsers.parts import CallArguments, CallBegin, Content, ParsedPart, Reasoning
from tandem.cluster.text.tokenizer import Tokenizer
from tandem.proto import inference_pb2

SCHEMAS: dict[str, Any] = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "now": {"type": "object"},
}
CALLS = Calls(SCHEMAS)
DEEP = {"city": 'Łódź "}]', "days": 3, "more": [{"a": [1.5, None, True]}, "\\", "{"]}
TEXT = json.dumps(DEEP)


@dataclass
class Said:
    """An answer, put together."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, Any]] | None = None


def joined(parts: list[ParsedPart]) -> Said:
    content = "".join(part.text for part in parts if isinstance(part, Content))
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    calls = [part for part in parts if isinstance(part, CallBegin)]
    assert [call.index for call in calls] == list(range(len(calls)))
    texts = ["".join(p.text for p in parts if isinstance(p, CallArguments) and p.index == c.index) for c in calls]
    return Said(content, reasoning, [(call.name, json.loads(text)) for call, text in zip(calls, texts, strict=True)])


def parser(template: str, calls: Calls | None = CALLS, special: tuple[str, ...] = (), **options: Any) -> OutputParser:
    """Makes a parser for a checkpoint with this chat template, whose tokenizer has these special tokens."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.add_special_tokens(list(special))
    formats = OutputFormats(Tokenizer(inner, ChatTemplates({"default": "{#" + template + "#}"}, {})), **options)
    made = formats.parser(calls, opened=False, keep_special=False)
    assert made is not None
    return made


def in_pieces(made: OutputParser, text: str, seed: int) -> list[ParsedPart]:
    """All parts of a text that comes in pieces of random lengths; seed 0: at once."""
    draw = random.Random(seed)
    parts: list[ParsedPart] = []
    while text:
        size = draw.choice([1, 1, 2, 3, 7, 30]) if seed else len(text)
        parts += made.push(text[:size])
        text = text[size:]
    return parts + made.finish()


TAGGED, LLAMA, MISTRAL = "<tool_call>", "<|python_tag|>", "[TOOL_CALLS]"
DEEPSEEK = "<｜tool▁calls▁begin｜>"
THINKING = "<think></think><tool_call>"
HARMONY = "<|channel|>"
W, N = ("weather", DEEP), ("now", {})
CASES: list[tuple[str, str, Said]] = [
    (TAGGED, "Just words, 1 < 2 <tool", Said("Just words, 1 < 2 <tool", calls=[])),
    (TAGGED, "A space at the end stays. \n", Said("A space at the end stays. \n", calls=[])),
    (
        TAGGED,
        f'I look.\n<tool_call>\n{{"name": "weather", "arguments": {TEXT}}}\n</tool_call>\n'
        '<tool_call>{"arguments": {}, "name": "now"}</tool_call>\n',
        Said("I look.", calls=[W, N]),
    ),
    (TAGGED, '<tool_call>{"name": "now"}</tool_call> Done.', Said(" Done.", calls=[N])),
    (TAGGED, '<tool_call>{"x": 1}</tool_call>', Said('<tool_call>{"x": 1}</tool_call>', calls=[])),
    (TAGGED, "<tool_call>no call</tool_call>", Said("<tool_call>no call</tool_call>", calls=[])),
    (TAGGED, '<tool_call>{"name": "now", "arg', Said('<tool_call>{"name": "now", "arg', calls=[])),
    (
        TAGGED,
        "<tool_call>\n<function=weather>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "<parameter=why>\nfor <fun>\n</parameter>\n</function>\n</tool_call>",
        Said("", calls=[("weather", {"city": "12", "days": 3, "why": "for <fun>"})]),
    ),
    (
        TAGGED,
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>12</arg_value>\n"
        "<arg_key>days</arg_key><arg_value>[4]</arg_value>\n</tool_call>",
        Said("", calls=[("weather", {"city": "12", "days": [4]})]),
    ),
    (LLAMA, f'{{"name": "weather", "parameters": {TEXT}}}', Said("", calls=[W])),
    (
        LLAMA,
        f'<|python_tag|>{{"name": "weather", "parameters": {TEXT}}}; {{"name": "now", "parameters": {{}}}}',
        Said("", calls=[W, N]),
    ),
    (LLAMA, '{"colour": "red"} is JSON.', Said('{"colour": "red"} is JSON.', calls=[])),
    (LLAMA, "The set {1, 2}", Said("The set {1, 2}", calls=[])),
    (
        MISTRAL,
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {TEXT}}}, {{"name": "now", "arguments": "{{}}"}}]',
        Said("", calls=[W, N]),
    ),
    (MISTRAL, f"Yes.[TOOL_CALLS]weather{TEXT}[TOOL_CALLS]now{{}}", Said("Yes.", calls=[W, N])),
    (MISTRAL, f"[TOOL_CALLS]weather[CALL_ID]abc[ARGS]{TEXT}", Said("", calls=[W])),
    (MISTRAL, "[TOOL_CALLS] 5", Said("[TOOL_CALLS] 5", calls=[])),
    (
        DEEPSEEK,
        f"Ok<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{TEXT}\n```"
        "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        Said("Ok", calls=[W, N]),
    ),
    (
        DEEPSEEK,
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{TEXT}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        Said("", calls=[W]),
    ),
    ("<|tool|>", f'functools[{{"name": "weather", "arguments": {TEXT}}}]', Said("", calls=[W])),
    (THINKING, "<think>\nHm. \n\n</think>\n\nYes.", Said("Yes.", "Hm.", [])),
    (THINKING, "\n<think>never ends ", Said("", "never ends", [])),
    (THINKING, " \nno thought", Said(" \nno thought", "", [])),
    (THINKING, '<think>a</think><tool_call>{"name": "now"}</tool_call>', Said("", "a", [N])),
    (
        HARMONY,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{TEXT}<|call|>",
        Said("I look.", "Hm.", [W]),
    ),
    (
        HARMONY,
        f" to=functions.weather<|channel|>commentary <|constrain|>json<|message|>{TEXT}",
        Said("", "", [W]),
    ),
    (HARMONY, "<|channel|>final<|message|>Yes. <|return|>", Said("Yes. ", "", [])),
    (HARMONY, "no marks", Said("no marks", "", [])),
    (HARMONY, "<|message|>only a body", Said("only a body", "", [])),
]


@pytest.mark.parametrize(("template", "text", "said"), CASES)
def test_what_is_found_however_the_text_is_cut(template: str, text: str, said: Said) -> None:
    for seed in range(25):
        assert joined(in_pieces(parser(template), text, seed)) == said


def test_python_calls() -> None:
    for text, calls in (
        ("[weather(city='x', days=3), now()]", [("weather", {"city": "x", "days": 3}), N]),
        ("[1, 2]", []),
        ("[weather(f(1))]", []),
        ("[" * 10_000, []),
    ):
        said = joined(in_pieces(parser("", tools="pythonic"), text, 0))
        assert said == Said("" if calls else text, calls=calls)


@pytest.mark.parametrize("seed", range(10))
def test_forced_calls_are_json(seed: int) -> None:
    listed = f'[{{"name": "weather", "parameters": {TEXT}}},{{"name": "now", "parameters": {{}}}}]'
    assert joined(in_pieces(parser("", Calls(SCHEMAS, required=True)), listed, seed)) == Said("", calls=[W, N])
    assert joined(in_pieces(parser(THINKING, Calls(SCHEMAS, named="weather")), TEXT, seed)) == Said("", calls=[W])
    one = Calls(SCHEMAS, required=True, most=1)
    assert joined(in_pieces(parser("", one), listed, seed)) == Said("", calls=[W])


def test_arguments_stream() -> None:
    made = parser(TAGGED)
    assert made.push('x <tool_call>{"name": "wea') == [Content("x")]
    assert made.push('ther", "arguments": ') == []  # which may be no object: then it is no call
    begin, arguments = made.push('{"ci')
    assert isinstance(begin, CallBegin)
    assert begin.name == "weather"
    assert arguments == CallArguments(0, '{"ci')
    assert made.push('ty": "Łó') == [CallArguments(0, 'ty": "Łó')]


def test_a_call_that_breaks_off_has_what_came() -> None:
    made = parser(TAGGED)
    parts = made.push('<tool_call>{"name": "now", "arguments": {"a": [1, "x') + made.finish()
    assert "".join(part.text for part in parts if isinstance(part, CallArguments)) == '{"a": [1, "x'


def test_ids_are_as_templates_want_them() -> None:
    for template, length in ((MISTRAL, 9), (TAGGED, 29)):
        mark = "[TOOL_CALLS]now{}" if template == MISTRAL else '<tool_call>{"name": "now"}</tool_call>'
        first, second = ([part for part in parser(template).push(mark) if isinstance(part, CallBegin)] for _ in "ab")
        assert len(first[0].call_id) == length
        assert first[0].call_id != second[0].call_id


def test_special_tokens_that_are_marks_stay_and_others_go() -> None:
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.add_special_tokens([MISTRAL, "<s>"])
    formats = OutputFormats(Tokenizer(inner, ChatTemplates({"default": "{#[TOOL_CALLS]#}"}, {})))
    assert formats.needs_special_tokens(CALLS)
    assert not formats.needs_special_tokens(None)
    assert not formats.needs_special_tokens(Calls(SCHEMAS, named="now"))
    for keep, content in ((False, "a"), (True, "a<s>")):
        made = formats.parser(CALLS, opened=False, keep_special=keep)
        assert made is not None
        assert joined(in_pieces(made, "a<s>[TOOL_CALLS]now{}", 0)) == Said(content, calls=[N])
    assert formats.parser(None, opened=False, keep_special=False) is None


def test_prompts_that_open_the_reasoning() -> None:
    source = "{{ messages[0].content }}{% if think %}<think>\n{% elif think is false %}<think>\n\n</think>{% endif %}"
    formats = OutputFormats(
        Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE()), ChatTemplates({"default": source}, {}))
    )
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="?")])
    for think, left in ((True, Left.OPEN), (False, Left.OVER), (None, Left.TO_COME), (True, Left.OPEN)):
        assert formats.reasoning(chat, {"think": think}, begins=True) == left
    sources = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools[0].function.name }}<think>\n"}
    named = OutputFormats(Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE()), ChatTemplates(sources, {})))
    for tools, left in (("", Left.TO_COME), ("[{}]", Left.OPEN), ("", Left.TO_COME)):
        chat.tools = tools
        assert named.reasoning(chat, {}, begins=True) == left
    chat.tools, chat.continue_final_message = "", True
    for content, left in (("<think>Hm. I", Left.OPEN), ("<think>Hm.</think>Yes", Left.OVER), ("Yes", Left.OVER)):
        chat.messages[0].content = content
        assert formats.reasoning(chat, {"think": True}, begins=False) == left
    made = formats.parser(None, opened=True, keep_special=False)
    assert made is not None
    assert joined(in_pieces(made, "a thought</think>said", 0)) == Said("said", "a thought", [])


def test_models_think_before_what_follows_a_guide() -> None:
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<think>": 0, "a": 1}, unk_token="a"))
    plain = tokenizers.Tokenizer(tokenizers.models.BPE())
    guide, own = inference_pb2.Guided(regex="[a-c]"), inference_pb2.Guided(regex="<think>a</think>b")
    for tokenizer, guided, left, most, begins, opened in (
        (inner, guide, Left.OPEN, None, Left.OPEN, True),
        (inner, guide, Left.OPEN, 64, Left.OPEN, True),
        (inner, guide, Left.OPEN, 63, Left.OVER, None),
        (inner, guide, Left.OVER, None, Left.OVER, None),
        (inner, guide, Left.TO_COME, None, Left.TO_COME, False),
        (plain, guide, Left.TO_COME, None, Left.OVER, None),  # which has no token for the tag
        (inner, own, Left.OPEN, None, Left.OPEN, None),
    ):
        formats = OutputFormats(Tokenizer(tokenizer, ChatTemplates({"default": "{#<think>#}"}, {})))
        made = inference_pb2.Guided()
        made.CopyFrom(guided)
        assert formats.think_before(made, left, most) == begins
        assert made.HasField("thinking") == (opened is not None)
        assert made.thinking.opened == bool(opened)


@pytest.mark.parametrize("seed", range(5))
def test_forced_calls_come_behind_the_reasoning(seed: int) -> None:
    for calls, text in (
        (Calls(SCHEMAS, named="weather"), TEXT),
        (Calls(SCHEMAS, required=True), f'[{{"name": "weather", "parameters": {TEXT}}}]'),
    ):
        made = parser(THINKING, calls)
        assert joined(in_pieces(made, f"<think>\nHm. <tool_call></think>\n\n{text}", seed)) == Said(
            "", "Hm. <tool_call>", [W]
        )
