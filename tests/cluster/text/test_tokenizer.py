"""Tokenizer, its text streams and chat templates, against transformers and against decoding everything at once."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models

from tandem.cluster.text import chat_template
from tandem.cluster.text.chat_template import ChatTemplate, ChatTemplateError
from tandem.cluster.text.tokenizer import HELD_TOKENS, Tokenizer
from tandem.cluster.tools.random_checkpoint import EOS, make_checkpoint
from tandem.workers.checkpoint.errors import InvalidConfig, InvalidTokenizer

TEXTS = ["", "Hello, world.", "  two  spaces\n\tand a tab", "naïve café 日本語 🦢", "<|end|> inside"]
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why? <b>&'\" é"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_checkpoint(folder, "llama", "tiny")
    return folder


def load(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Makes a tokenizer like Llama 2's: pieces that begin with a space, single bytes, and a decoder that strips the
    first space."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁a", "▁b", "c", "▁"]
    inner = Inner(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(steps)
    inner.add_special_tokens(["<s>"])
    return Tokenizer(inner, None)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_encodes_as_transformers(folder: Path, text: str, add_special_tokens: bool) -> None:
    from transformers import AutoTokenizer

    expected = AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=add_special_tokens)["input_ids"]
    assert load(folder).encode(text, add_special_tokens=add_special_tokens) == expected


def test_truncation_that_the_file_asks_for_is_off(folder: Path, tmp_path: Path) -> None:
    inner = Inner.from_file(str(folder / "tokenizer.json"))
    inner.enable_truncation(2)
    inner.enable_padding(length=50)
    inner.save(str(tmp_path / "tokenizer.json"))
    assert load(tmp_path).encode("a b c d e f") == load(folder).encode("a b c d e f")


def stream_text(tokenizer: Tokenizer, pieces: list[list[int]], skip_special_tokens: bool = True) -> list[str]:
    stream = tokenizer.stream(skip_special_tokens=skip_special_tokens)
    return [*(stream.push(piece) for piece in pieces), stream.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_gives_whole_characters_and_all_of_them(folder: Path, text: str) -> None:
    tokenizer = load(folder)
    ids = tokenizer.encode(text)
    parts = stream_text(tokenizer, [[token] for token in ids])
    assert "".join(parts) == tokenizer.decode(ids)
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)


@given(st.text(max_size=40), st.data())
def test_any_text_in_any_pieces(folder: Path, text: str, data: st.DataObject) -> None:
    tokenizer = load(folder)
    ids = tokenizer.encode(text, add_special_tokens=False)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(ids)), max_size=5)))
    pieces = [ids[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    assert "".join(stream_text(tokenizer, pieces, skip_special_tokens=False)) == tokenizer.decode(
        ids, skip_special_tokens=False
    )


@pytest.mark.parametrize("kind", ["bytes", "fallback"])
@given(text=st.text(max_size=40), data=st.data())
def test_skipped_tokens_and_large_pieces_change_nothing(
    folder: Path, kind: str, text: str, data: st.DataObject
) -> None:
    """A slow gateway gets many tokens at once, and they may end within a character."""
    tokenizer = load(folder) if kind == "bytes" else byte_fallback()
    skipped, *_ = tokenizer.special_ids
    ids = tokenizer.encode(text, add_special_tokens=False)
    for _ in range(data.draw(st.integers(0, 2))):
        place = data.draw(st.integers(0, len(ids)))
        ids[place:place] = [skipped] * data.draw(st.sampled_from([1, HELD_TOKENS - 1, HELD_TOKENS]))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(ids)), max_size=3)))
    pieces = [ids[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    assert "".join(stream_text(tokenizer, pieces)) == tokenizer.decode(ids)


def test_a_large_piece_may_end_within_a_character() -> None:
    """A decoder of single bytes takes such a character for bad, with all bytes before it."""
    tokenizer = byte_fallback()
    ids = tokenizer.encode("日" * HELD_TOKENS)
    assert stream_text(tokenizer, [ids[:-1], ids[-1:]]) == ["日" * (HELD_TOKENS - 1), "日", ""]


def test_what_a_large_piece_leaves_incomplete_is_flushed(folder: Path) -> None:
    tokenizer = load(folder)
    ids = tokenizer.encode("a" * HELD_TOKENS + "🦢", add_special_tokens=False)[:-1]
    assert "".join(stream_text(tokenizer, [ids])) == tokenizer.decode(ids)


@given(st.text(alphabet="ab日🦢 ", min_size=1, max_size=20))
def test_byte_fallback_streams(text: str) -> None:
    tokenizer = byte_fallback()
    ids = [1 + byte for byte in text.encode()]
    for prefix in ([], [257], [260]):
        parts = stream_text(tokenizer, [[token] for token in prefix + ids])
        assert "".join(parts) == tokenizer.decode(prefix + ids)
        assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)


@given(st.text(alphabet="a日🦢\N{REPLACEMENT CHARACTER}", max_size=30))
@example("\N{REPLACEMENT CHARACTER}" * 6 + "🦢日")
def test_replacement_characters_of_the_text_itself_spoil_nothing(text: str) -> None:
    """They look like incomplete ones, and are held back for a while."""
    tokenizer = byte_fallback()
    ids = [1 + byte for byte in text.encode()]
    assert "".join(stream_text(tokenizer, [[token] for token in ids])) == text


def test_spaces_between_pieces_stay() -> None:
    tokenizer = byte_fallback()
    assert stream_text(tokenizer, [[257], [258], [259], [257]]) == ["a", " b", "c", " a", ""]


def test_an_incomplete_character_is_held_back_and_flushed(folder: Path) -> None:
    tokenizer = byte_fallback()
    assert stream_text(tokenizer, [[257], [1 + 0xE6], [1 + 0x97]]) == ["a", "", "", "\N{REPLACEMENT CHARACTER}" * 2]


def test_bytes_that_never_end_are_not_held_for_ever() -> None:
    stream = byte_fallback().stream()
    held = 0
    for _ in range(5 * HELD_TOKENS):
        held = 0 if stream.push([1 + 0xFF]) else held + 1
        assert held < HELD_TOKENS


def test_special_tokens_are_skipped_or_shown(folder: Path) -> None:
    tokenizer = load(folder)
    ids = [tokenizer.encode(EOS, add_special_tokens=False)[0]] * (3 * HELD_TOKENS)
    assert "".join(stream_text(tokenizer, [[token] for token in ids])) == ""
    assert "".join(stream_text(tokenizer, [[token] for token in ids], skip_special_tokens=False)) == EOS * len(ids)


def test_chat_encodes_as_transformers(folder: Path) -> None:
    from transformers import AutoTokenizer

    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(MESSAGES, add_generation_prompt=True)
    assert load(folder).encode_chat(MESSAGES) == expected["input_ids"]


TEMPLATE = """
{%- for message in messages %}
    {%- if loop.index > 9 %}{% break %}{% endif %}
    {% generation %}[{{ message | tojson }}]{% endgeneration %}
{%- endfor %}
{{ strftime_now("%%") }}{{ eos_token }}{{ unk_token }}
{% if add_generation_prompt %}
go{% endif %}
"""


def test_template_renders_as_in_transformers(folder: Path, tmp_path: Path) -> None:
    """The file goes before tokenizer_config.json; tokens may be written as objects."""
    from transformers import AutoTokenizer

    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    tokens = {"eos_token": {"content": EOS, "special": True, "__type": "AddedToken"}, "chat_template": "not this"}
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **tokens})
    )
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE, newline="")
    expected = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        MESSAGES, add_generation_prompt=True, tokenize=False
    )
    assert EOS in expected
    assert load(tmp_path).encode_chat(MESSAGES) == load(folder).encode(expected, add_special_tokens=False)


@pytest.mark.parametrize("newer", [{}, {"added_tokens_decoder": {}}])
def test_special_tokens_of_an_older_checkpoint(folder: Path, tmp_path: Path, newer: dict[str, Any]) -> None:
    """They stand in a file of their own, which later ones have for still older readers."""
    from transformers import AutoTokenizer

    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "not this", "chat_template": TEMPLATE, **newer}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    tokens = {"eos_token": {"content": EOS, "lstrip": False}, "unk_token": EOS}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(tokens))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert (EOS * 2 in expected) == (not newer)
    rendered = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
    assert load(tmp_path).encode_chat(MESSAGES) == rendered


TURNS = """
{%- for message in messages %}<{{ message.role }}>{{ CONTENT }}</>
{% endfor %}{% if add_generation_prompt %}<bot>{% if not enable_thinking | default(true) %}hm{% endif %}{% endif %}
"""


@pytest.mark.parametrize("content", ["message.content", "message.content | trim"])
@pytest.mark.parametrize("said", ["It is", "It is ", "  It is\n\n"])
@pytest.mark.parametrize(
    ("variables", "options"),
    [
        ({}, {"add_generation_prompt": False}),
        ({"enable_thinking": False}, {"add_generation_prompt": True}),
        ({}, {"add_generation_prompt": False, "continue_final_message": True}),
    ],
)
def test_options_of_templates_are_those_of_transformers(
    folder: Path, tmp_path: Path, variables: dict[str, Any], options: dict[str, Any], said: str, content: str
) -> None:
    from transformers import AutoTokenizer

    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    template = TURNS.replace("CONTENT", content)
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    turns = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": said}]
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(turns, tokenize=False, **options, **variables)
    assert ChatTemplate(template, {}).render(turns, variables=variables, **options) == expected
    assert load(tmp_path).encode_chat(turns, variables=variables, **options) == load(folder).encode(
        expected, add_special_tokens=False
    )


def test_tools_and_calls_of_templates_are_those_of_transformers(folder: Path, tmp_path: Path) -> None:
    """Some templates take a call's arguments as an object, others as text."""
    from transformers import AutoTokenizer

    shows = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}{{ m.content }}"
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": [1, "é"]}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_call_id": "a"},
    ]
    as_text = json.loads(json.dumps(turns))
    as_text[1]["tool_calls"][0]["function"]["arguments"] = json.dumps({"x": [1, "é"]})
    ends = "{% endfor %}{{ m.tool_call_id }}{% endfor %}"
    for shown, sent in (("c.function.arguments | tojson", turns), ("'(' + c.function.arguments", as_text)):
        template = shows + "{% for c in m.tool_calls or [] %}{{ c.id }}{{ " + shown + " }}" + ends
        (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
        fields = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
        theirs = AutoTokenizer.from_pretrained(tmp_path)
        expected = theirs.apply_chat_template(sent, tools=tools, tokenize=False)
        assert ChatTemplate(template, {}).render(as_text, tools=tools, add_generation_prompt=False) == expected


def test_a_template_without_the_last_message_cannot_continue_it() -> None:
    for turns in (MESSAGES, []):
        with pytest.raises(ChatTemplateError, match="does not show the last message"):
            ChatTemplate("hello", {}).render(turns, continue_final_message=True)


def test_a_list_of_templates_has_a_default(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert load(tmp_path).encode_chat(MESSAGES) == load(folder).encode("yes", add_special_tokens=False)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no system role') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ undefined.field }}",
    ],
)
def test_a_template_that_refuses_or_misbehaves_fails_the_request(source: str) -> None:
    with pytest.raises(ChatTemplateError, match=r"the chat template refuses these messages: ."):
        ChatTemplate(source, {}).render(MESSAGES)


def test_what_a_template_repeats_is_cut() -> None:
    """It travels as a status, whose text must be short."""
    with pytest.raises(ChatTemplateError) as caught:
        ChatTemplate("{{ raise_exception(messages[0].content) }}", {}).render(
            [{"role": "user", "content": "x" * 20_000}]
        )
    assert len(str(caught.value)) < 1000


def test_a_template_that_does_not_compile_fails_the_load() -> None:
    with pytest.raises(InvalidTokenizer, match="does not compile"):
        ChatTemplate("{% for %}", {})


def test_missing_and_broken_files(folder: Path, tmp_path: Path) -> None:
    assert Tokenizer.from_folder(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidTokenizer, match=r"tokenizer\.json is not a readable tokenizer"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    tokenizer = load(tmp_path)
    assert not tokenizer.has_chat_template
    with pytest.raises(ChatTemplateError, match="no chat template; send text or token ids"):
        tokenizer.encode_chat(MESSAGES)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(InvalidConfig, match=r"tokenizer_config\.json is not readable JSON"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": 3}')
    with pytest.raises(InvalidTokenizer, match="chat_template is a int; it must be a string"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": ["text", {"name": "default", "template": 3}]}')
    with pytest.raises(InvalidTokenizer, match="chat_template is a int; it must be a string"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(InvalidTokenizer, match=r"chat_template\.jinja cannot be read: 'utf-8'"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% set x = b %}{% endfor %}{% endfor %}",
        "{% set many = range(99999) | list %}{% for a in many %}{% for b in many %}{% endfor %}{% endfor %}",
    ],
)
def test_a_template_that_runs_on_is_ended(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "RENDER_SECONDS", 0.05)
    tracer = sys.gettrace()
    with pytest.raises(ChatTemplateError, match=r"runs for more than 0\.05 s"):
        ChatTemplate(source, {}).render(MESSAGES)
    assert sys.gettrace() is tracer


@pytest.mark.parametrize("source", ["{{ 'x' * 99999999999 }}", "{{ 9 ** 9999999 }}", "{{ 3 * ([1, 2] * 1000000) }}"])
def test_a_template_that_asks_for_too_much_is_ended(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="would make"):
        ChatTemplate(source, {}).render(MESSAGES)
    assert ChatTemplate("{{ '=' * 3 }}{{ 2 ** 5 }}{{ 2 * 1.5 }}", {}).render(MESSAGES) == "===323.0"
