"""A folder's tokenizer files, read together: ids, special tokens and chat prompts equal transformers'."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Inner
from tokenizers.normalizers import Lowercase

from tandem.cluster.text.chat_template import ChatTemplateError
from tandem.cluster.text.tokenizer import Tokenizer
from tandem.cluster.tools.random_checkpoint import BOS, EOS, train_tokenizer
from tandem.workers.checkpoint import tokenizer_files
from tandem.workers.checkpoint.errors import InvalidConfig, InvalidTokenizer
from tandem.workers.checkpoint.tokenizer_files import TokenizerFiles, end_tokens

SIZE = 300  # of tokenizer.json's vocabulary
FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
TEXT = f"say [A] the[B]x [C] [a] [PAD]{EOS} {BOS} <x> the"
CHAT = [{"role": "user", "content": "Where is [A]?"}]
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]
SHOWS_TOKENS = "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ image_token }}|{{ messages[0].content }}"
OBJECT = {"__type": "AddedToken", "lstrip": True, "normalized": False, "rstrip": False, "single_word": False}


def token(text: str, **flags: bool) -> dict[str, Any]:
    return OBJECT | {"content": text} | flags


@pytest.fixture(scope="module")
def vocabulary() -> Inner:
    inner = train_tokenizer(SIZE)
    assert inner.get_vocab_size() == SIZE
    return inner


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowers the limits of added tokens and templates to 8."""
    monkeypatch.setattr(tokenizer_files, "MAX_ADDED", 8)
    monkeypatch.setattr(tokenizer_files, "MAX_TEMPLATES", 8)


def write(folder: Path, inner: Inner, files: dict[str, Any]) -> Path:
    """files: objects by the names of JSON files without their ending, and texts by whole names."""
    inner.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text("{}")
    for name, content in files.items():
        path = folder / (name if isinstance(content, str) else f"{name}.json")
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content), newline="")
    return folder


def load(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    return tokenizer


def outcome(render: Any) -> str | None:
    """None for a prompt that is refused."""
    try:
        return render()
    except (ChatTemplateError, ValueError):
        return None


def check(folder: Path) -> Any:
    """Everything that is asked of a tokenizer is as transformers has it. Returns transformers' tokenizer."""
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(folder), load(folder)
    files = TokenizerFiles.read(folder)
    assert files is not None
    for special in (True, False):
        expected = theirs(TEXT, add_special_tokens=special)["input_ids"]
        assert ours.encode(TEXT, add_special_tokens=special) == expected
    assert ours.vocab_size == len(theirs)
    assert files.special_tokens == theirs.special_tokens_map
    assert files.eos_token_id(files.tokenizer()) == theirs.eos_token_id
    ids = range(len(theirs))
    assert [ours.decode([one]) for one in ids] == [theirs.decode([one], skip_special_tokens=True) for one in ids]
    for tools in (None, TOOLS):
        expected = outcome(lambda tools=tools: theirs.apply_chat_template(CHAT, tools=tools, tokenize=False))
        options = {"tools": tools, "add_generation_prompt": False}
        assert outcome(lambda options=options: ours.render_chat(CHAT, **options)) == expected
        if expected is not None:
            rendered = theirs.apply_chat_template(CHAT, tools=tools)["input_ids"]
            assert ours.encode_chat(CHAT, **options) == rendered
    return theirs


LISTED = [
    {"name": "default", "template": "D" + SHOWS_TOKENS},
    {"name": "tool_use", "template": "T{{ tools | tojson }}" + SHOWS_TOKENS},
    {"name": "rag", "template": "R{{ messages[0].content }}"},
]
FOLDER = "additional_chat_templates"
ADDED = {str(SIZE): token("[A]"), str(SIZE + 1): token("[B]")}
NEW_NAMES = {"pad_token": "[PAD]", "eos_token": token("[C]"), "image_token": "<x>"}
OLDER: dict[str, Any] = {
    "special_tokens_map": {"bos_token": {"content": BOS, "lstrip": False}, "pad_token": "[PAD]"},
    "added_tokens": {"[B]": SIZE, "[PAD]": SIZE + 1},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "tokens by id": {"added_tokens_decoder": ADDED},
    "ids with a gap": {"eos_token": "[B]", "added_tokens_decoder": {"700": token("[B]")}},
    "another file's flags": {"added_tokens_decoder": {"1": token(EOS, special=False)}},
    "names that are new": NEW_NAMES,
    "unnamed ones": {"additional_special_tokens": ["[B]", token("[A]", special=True)]},
    "named extras": {"extra_special_tokens": {"image_token": "<x>"}, "chat_template": SHOWS_TOKENS},
    "special tokens as text": {"split_special_tokens": True},
    "what is added to texts": {"bos_token": BOS, "add_bos_token": False, "add_eos_token": True},
    "one template": {"chat_template": SHOWS_TOKENS},
    "a list of templates": {"eos_token": EOS, "chat_template": LISTED},
    "a list without a default": {"chat_template": LISTED[1:]},
}
LIST = {"tokenizer_config": {**FAST, "chat_template": LISTED}}
FOLDERS: dict[str, dict[str, Any]] = {
    **{name: {"tokenizer_config": FAST | config} for name, config in CONFIGS.items()},
    "older files": {"tokenizer_config": {**FAST, "bos_token": "[A]", "chat_template": SHOWS_TOKENS}, **OLDER},
    "older files that a newer one hides": {
        "tokenizer_config": {**FAST, "added_tokens_decoder": {}, "eos_token": EOS, "chat_template": SHOWS_TOKENS},
        **OLDER,
    },
    "no tokenizer_config": {"special_tokens_map": {"eos_token": EOS}, "added_tokens": {"[B]": SIZE, "[C]": 4}},
    "tokenizer.json alone": {},
    "template files": {**LIST, "chat_template.jinja": "file", f"{FOLDER}/tool_use.jinja": "{{ tools | tojson }}"},
    "one template file": {**LIST, "chat_template.jinja": "file"},
    "no default among the files": {**LIST, f"{FOLDER}/tool_use.jinja": "file"},
    "a default among the files": {"chat_template.jinja": "file", f"{FOLDER}/default.jinja": "named"},
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_read_as_transformers_reads_it(tmp_path: Path, vocabulary: Inner, name: str) -> None:
    check(write(tmp_path, vocabulary, FOLDERS[name]))


def random_folder(rng: random.Random) -> dict[str, Any]:
    """Special tokens are objects only where no added_tokens.json is: transformers overlooks them there."""
    names = ("bos_token", "eos_token", "pad_token", "unk_token", "image_token")
    texts = ("[A]", "[B]", "[C]", EOS, BOS, "the")
    is_older = rng.random() < 0.5

    def one() -> Any:
        text = rng.choice(texts)
        return text if is_older or rng.random() < 0.5 else token(text, special=True, normalized=rng.random() < 0.5)

    config: dict[str, Any] = FAST | {name: one() for name in names if rng.random() < 0.4}
    files: dict[str, Any] = {"tokenizer_config": config}
    if rng.random() < 0.5:
        config[rng.choice(("additional_special_tokens", "extra_special_tokens"))] = [one() for _ in range(2)]
    if rng.random() < 0.7:
        config["chat_template"] = rng.choice((SHOWS_TOKENS, rng.sample(LISTED, rng.randint(1, 3))))
    if is_older:
        files["added_tokens"] = {text: SIZE + index for index, text in enumerate(rng.sample(texts[:3], 2))}
    elif rng.random() < 0.7:
        ids = rng.sample(range(SIZE + 5), rng.randint(0, 3))
        config["added_tokens_decoder"] = {str(i): token(rng.choice(texts), special=rng.random() < 0.5) for i in ids}
    if rng.random() < 0.5:
        files["special_tokens_map"] = {name: rng.choice(texts) for name in names if rng.random() < 0.4}
    return files


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
def test_random_folders_are_read_as_transformers_reads_them(tmp_path: Path, vocabulary: Inner, seed: int) -> None:
    inner = Inner.from_str(vocabulary.to_str())
    if seed % 2:
        inner.normalizer = Lowercase()
    rng = random.Random(seed)
    for count in range(20):
        (folder := tmp_path / str(count)).mkdir()
        check(write(folder, inner, random_folder(rng)))


def test_a_variable_names_a_template(tmp_path: Path, vocabulary: Inner) -> None:
    from transformers import AutoTokenizer

    folder = write(tmp_path, vocabulary, FOLDERS["a list of templates"])
    theirs, ours = AutoTokenizer.from_pretrained(folder), load(folder)
    for name in ("rag", "default", "tool_use"):
        expected = theirs.apply_chat_template(CHAT, chat_template=name, tools=TOOLS, tokenize=False)
        options = {"variables": {"chat_template": name}, "tools": TOOLS, "add_generation_prompt": False}
        assert ours.render_chat(CHAT, **options) == expected
    with pytest.raises(
        ChatTemplateError, match=r"chat_template is 'other'; names of templates: default, tool_use, rag"
    ):
        ours.render_chat(CHAT, variables={"chat_template": "other"})


def test_a_missing_default_is_named(tmp_path: Path, vocabulary: Inner) -> None:
    ours = load(write(tmp_path, vocabulary, FOLDERS["a list without a default"]))
    with pytest.raises(ChatTemplateError, match="are named tool_use, rag, and none is named default; name one of them"):
        ours.render_chat(CHAT)


def test_the_template_of_a_processor_is_the_last_resort(tmp_path: Path, vocabulary: Inner) -> None:
    folder = write(tmp_path, vocabulary, {"chat_template": {"chat_template": "of images"}})
    assert load(folder).render_chat(CHAT) == "of images"
    write(tmp_path, vocabulary, {"tokenizer_config": {"chat_template": "of text"}})
    assert load(folder).render_chat(CHAT) == "of text"


@pytest.mark.parametrize(
    ("files", "of_model", "expected"),
    [
        ({"tokenizer_config": {"eos_token": EOS}}, (), (1,)),
        ({"tokenizer_config": {"eos_token": {"content": EOS}}}, (7, 9), (7, 9, 1)),
        ({"special_tokens_map": {"eos_token": EOS}}, (1, 7), (1, 7)),
        ({"tokenizer_config": {"eos_token": "[new]"}}, (7, SIZE), (7,)),  # the model has no such ids
        ({"tokenizer_config": {"eos_token": None}}, (7,), (7,)),
    ],
)
def test_the_tokenizers_end_token_ends_answers_too(
    tmp_path: Path, vocabulary: Inner, files: dict[str, Any], of_model: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert end_tokens(write(tmp_path, vocabulary, files), of_model, SIZE) == expected


def test_a_model_without_a_tokenizer_has_its_own_end_tokens(tmp_path: Path) -> None:
    assert end_tokens(tmp_path, (3, 99), 99) == (3,)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"added_tokens_decoder": {"x": "[A]"}}, "added_tokens_decoder has the key 'x'; each key must be a token id"),
        ({"added_tokens_decoder": {"1": 5}}, "has 5; it must be a text, or an object with content"),
        ({"added_tokens_decoder": 5}, "added_tokens_decoder is 5; it must be an object"),
        ({"extra_special_tokens": [{}]}, "extra_special_tokens has {}; it must be a text"),
        ({"extra_special_tokens": ["x"] * 9}, "has 9 tokens; it may have at most 8"),
        ({"chat_template": {str(one): "" for one in range(9)}}, "has 9 templates; it may have at most 8"),
        ({"chat_template": [{"name": "default"}]}, "chat_template is a NoneType; it must be a string"),
        ({"split_special_tokens": 1}, "split_special_tokens is 1; it must be true or false"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_named(
    tmp_path: Path, vocabulary: Inner, config: dict[str, Any], reason: str, few: None
) -> None:
    with pytest.raises((InvalidConfig, InvalidTokenizer), match=reason):
        TokenizerFiles.read(write(tmp_path, vocabulary, {"tokenizer_config": config}))


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"added_tokens": {str(one): one for one in range(9)}}, "the object has 9 tokens; it may have at most 8"),
        ({"added_tokens": {"[A]": "one"}}, r"\[A\] is 'one'; it must be an integer"),
        ({"special_tokens_map": []}, r"special_tokens_map\.json holds a list; it must hold a JSON object"),
        ({f"{FOLDER}/{one}.jinja": "" for one in range(9)}, "has 9 templates; it may have at most 8"),
    ],
)
def test_other_files_that_cannot_be_used_are_named(
    tmp_path: Path, vocabulary: Inner, files: dict[str, Any], reason: str, few: None
) -> None:
    with pytest.raises((InvalidConfig, InvalidTokenizer), match=reason):
        TokenizerFiles.read(write(tmp_path, vocabulary, files))
