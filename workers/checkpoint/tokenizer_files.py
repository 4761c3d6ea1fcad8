"""A checkpoint's tokenizer files as one value, read together as transformers reads them.

| file | what it has |
|---|---|
| tokenizer.json | the vocabulary, and most added tokens |
| tokenizer_config.json | special tokens by name, other added tokens, chat templates |
| special_tokens_map.json, added_tokens.json | the same, of a tokenizer_config.json without added_tokens_decoder |
| chat_template.jinja, additional_chat_templates/ | chat templates, in place of those in tokenizer_config.json |
| chat_template.json | the chat template of a processor; read where no other file has one |
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from tandem.workers.checkpoint.errors import InvalidTokenizer
from tandem.workers.checkpoint.fields import Fields
from tandem.workers.checkpoint.files import check_size, is_there, open_regular, read_text

MAX_TOKENIZER_BYTES = 256 << 20  # the largest published ones have 33 MB
MAX_TEMPLATE_BYTES = 1 << 20  # the longest published ones have 30 kB
MAX_TEMPLATES = 64
MAX_ADDED = 1 << 16  # tokens that files next to tokenizer.json name
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
DEFAULT = "default"  # the name of a template that stands alone


@dataclass(frozen=True)
class TokenizerFiles:
    """The contents of a folder's tokenizer files. tokenizer() makes the tokenizer, with the tokens of all files.

    special_tokens: texts by the names that templates know, bos_token and so on. chat_templates: sources by name.
    """

    path: Path  # of tokenizer.json
    special_tokens: Mapping[str, str]
    chat_templates: Mapping[str, str]
    added_by_id: Mapping[int, AddedToken]  # by their ids in files next to tokenizer.json
    added_by_text: tuple[AddedToken, ...]  # special tokens, which may be in the vocabulary already
    precedes_own: bool  # whether tokenizer.json's own added tokens replace those of added_by_id
    splits_special: bool  # whether a special token's text is a text like any other

    @classmethod
    def read(cls, folder: Path) -> "TokenizerFiles | None":
        """None without a tokenizer.json: the model takes token ids only. Raises ModelError."""
        path = folder / "tokenizer.json"
        if not is_there(path):
            return None
        fields = _fields(folder / "tokenizer_config.json")
        is_older = "added_tokens_decoder" not in fields
        older = _fields(folder / "special_tokens_map.json") if is_older else Fields({}, "")
        named, unnamed = _named(fields, older), _unnamed(fields, older)
        usual = [*(token for name, token in named.items() if name in NAMED), *unnamed]
        return cls(
            path=path,
            special_tokens={name: token.content for name, token in named.items()},
            chat_templates=_chat_templates(folder, fields),
            added_by_id=_added_before(folder, usual) if is_older else _added_by_id(fields),
            added_by_text=(*named.values(), *unnamed),
            precedes_own=is_older,
            splits_special=fields.boolean("split_special_tokens", False),
        )

    def tokenizer(self) -> Tokenizer:
        """It neither cuts nor pads. Takes up to a second. Raises InvalidTokenizer and CheckpointMissing."""
        with open_regular(self.path) as file:
            check_size(self.path, file, MAX_TOKENIZER_BYTES)
        try:
            tokenizer = Tokenizer.from_file(str(self.path))
            tokenizer.add_tokens(self._added_to(tokenizer.get_added_tokens_decoder()))
        except Exception as error:  # the library raises bare Exception
            raise InvalidTokenizer(f"{self.path} is not a readable tokenizer: {error}") from None
        tokenizer.encode_special_tokens = self.splits_special
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def eos_token_id(self, tokenizer: Tokenizer) -> int | None:
        """tokenizer: what tokenizer() returned."""
        text = self.special_tokens.get("eos_token")
        return None if text is None else tokenizer.token_to_id(text)

    def _added_to(self, own: Mapping[int, AddedToken]) -> list[AddedToken]:
        """The tokens to add to a tokenizer that has `own` ones, in transformers' order, from which new ids follow."""
        by_id = {**self.added_by_id, **own} if self.precedes_own else self.added_by_id
        added = [by_id[token_id] for token_id in sorted(by_id)]
        known = {token.content for token in (*own.values(), *added)}
        added += [one for one in dict.fromkeys(self.added_by_text) if one.content not in known]
        named = set(self.special_tokens.values())
        for token in added:
            token.special = token.special or token.content in named
        return added


def end_tokens(folder: Path, of_model: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """Returns the ids that end an answer: the model configuration's and, as in vLLM, the tokenizer's eos_token. Ids
    beyond the model's vocabulary are left out. Raises ModelError. Takes as long as TokenizerFiles.tokenizer()."""
    files = TokenizerFiles.read(folder)
    own = None if files is None or "eos_token" not in files.special_tokens else files.eos_token_id(files.tokenizer())
    ids = dict.fromkeys((*of_model, *(() if own is None else (own,))))
    return tuple(token_id for token_id in ids if token_id < vocab_size)


def _fields(path: Path) -> Fields:
    """Reads the fields of a JSON file, or none if there is no file."""
    return Fields.from_file(path) if is_there(path) else Fields({}, path.name)


def _is_token(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("content"), str))


def _token(value: Any, source: str) -> AddedToken:
    """A token that is written as its text or as an object. InvalidTokenizer for anything else."""
    if not _is_token(value):
        raise InvalidTokenizer(f"{source} has {value!r:.80}; it must be a text, or an object with content")
    if isinstance(value, str):
        return AddedToken(value, special=True)
    return AddedToken(value["content"], **{name: value[name] for name in FLAGS if isinstance(value.get(name), bool)})


def _named(fields: Fields, older: Fields) -> dict[str, AddedToken]:
    """bos_token and its like, in the order in which transformers gives new ones their ids."""
    now, before = ({name: one.raw(name) for name in one.names() if name.endswith("_token")} for one in (fields, older))
    of_templates = {name: value for name, value in (now | before).items() if name not in NAMED}
    texts = {name: now[name] for name in of_templates if isinstance(now.get(name), str)}
    of_templates = {name: value for name, value in of_templates.items() if name not in texts} | texts
    for one in (fields, older):
        extra = one.raw("extra_special_tokens")
        of_templates |= extra if isinstance(extra, dict) else {}
    values = {name: (now | before).get(name) for name in NAMED} | of_templates
    return {name: _token(value, fields.source) for name, value in values.items() if _is_token(value)}


def _unnamed(fields: Fields, older: Fields) -> list[AddedToken]:
    """Special tokens without names. additional_special_tokens is the older name of extra_special_tokens."""
    now, before = "extra_special_tokens", "additional_special_tokens"
    given = _listed(fields, now) or _listed(fields, before)
    return given + _listed(older, now) or _listed(older, before)


def _listed(fields: Fields, name: str) -> list[AddedToken]:
    values = fields.raw(name)
    if not isinstance(values, list):
        return []
    _check_number(fields.source, name, len(values))
    return [_token(value, f"{fields.source}: {name}") for value in values]


def _added_by_id(fields: Fields) -> dict[int, AddedToken]:
    section = fields.section("added_tokens_decoder")
    _check_number(fields.source, "added_tokens_decoder", len(section.names()))
    return {_id(key, section.source): _token(section.raw(key), section.source) for key in section.names()}


def _added_before(folder: Path, special: Iterable[AddedToken]) -> dict[int, AddedToken]:
    """Returns the added tokens of added_tokens.json, which has ids by text."""
    fields, texts = _fields(folder / "added_tokens.json"), {token.content for token in special}
    _check_number(fields.source, "the object", len(fields.names()))
    return {
        fields.integer(text): AddedToken(text, special=text in texts, normalized=text not in texts)
        for text in fields.names()
    }


def _id(key: str, source: str) -> int:
    if not key.isascii() or not key.isdecimal() or len(key) > 10:
        raise InvalidTokenizer(f"{source} has the key {key!r:.80}; each key must be a token id")
    return int(key)


def _check_number(source: str, name: str, count: int) -> None:
    if count > MAX_ADDED:
        raise InvalidTokenizer(f"{source}: {name} has {count} tokens; it may have at most {MAX_ADDED}")


def _chat_templates(folder: Path, fields: Fields) -> dict[str, str]:
    """Returns the templates of the first place that has any."""
    files = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    if len(files) > MAX_TEMPLATES:
        raise InvalidTokenizer(f"{files[0].parent} has {len(files)} templates; it may have at most {MAX_TEMPLATES}")
    named = {path.name.removesuffix(".jinja"): path for path in files}
    alone = folder / "chat_template.jinja"
    named = ({DEFAULT: alone} if is_there(alone) else {}) | named
    if named:
        return {name: _template(path) for name, path in named.items()}
    return _templates_of(fields) or _templates_of(_fields(folder / "chat_template.json"))


def _template(path: Path) -> str:
    try:
        return read_text(path, MAX_TEMPLATE_BYTES)
    except UnicodeDecodeError as error:
        raise InvalidTokenizer(f"{path} cannot be read: {error}") from None


def _templates_of(fields: Fields) -> dict[str, str]:
    """chat_template of a JSON file: a text, a list of objects with name and template, or an object of texts by name."""
    given = fields.raw("chat_template")
    if given is None:
        return {}
    named: dict[Any, Any] = {DEFAULT: given}
    if isinstance(given, list):
        entries = [entry for entry in given if isinstance(entry, dict)]
        named = {entry.get("name"): entry.get("template") for entry in entries}
    elif isinstance(given, dict):
        named = given
    if len(named) > MAX_TEMPLATES:
        raise InvalidTokenizer(
            f"{fields.source}: chat_template has {len(named)} templates; it may have at most {MAX_TEMPLATES}"
        )
    for name, source in named.items():
        if not isinstance(name, str) or not isinstance(source, str):
            kind = type(source if isinstance(name, str) else name).__name__
            raise InvalidTokenizer(f"{fields.source}: chat_template is a {kind}; it must be a string")
    return named
