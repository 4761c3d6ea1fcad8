"""The checkpoint's tokenizer: text to token ids and back, one token at a time."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers

from tandem.cluster.text.chat_template import MAX_TEMPLATE_BYTES, MOST_SAID, ChatTemplate, ChatTemplateError
from tandem.workers.checkpoint.errors import InvalidTokenizer
from tandem.workers.checkpoint.fields import Fields
from tandem.workers.checkpoint.files import check_size, open_regular, read_text

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
PANIC = "PanicException"  # the name of what the library raises when it fails: it derives from BaseException only
MAX_TOKENIZER_BYTES = 256 << 20  # the largest published ones have 33 MB
HELD_TOKENS = 16  # more than a character takes: the bytes that are still missing will not come
BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")  # a byte in the vocabulary of SentencePiece


def _byte_letters() -> Mapping[str, int]:
    """The letter that stands for each byte in a byte-level vocabulary, as GPT-2 chose them."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in shown]
    letters = {chr(byte): byte for byte in shown} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}
    return MappingProxyType(letters)


BYTES = _byte_letters()


class TokenizerFailed(ValueError):
    """The tokenizer failed on a text; the error says how."""


class Tokenizer:
    """A checkpoint's tokenizer.json and chat template, if any. Threads may share it. decode() may skip special_ids."""

    def __init__(self, inner: tokenizers.Tokenizer, chat_template: ChatTemplate | None) -> None:
        self._inner = inner
        self._chat_template = chat_template
        added = inner.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.special_texts = frozenset(token.content for token in added.values() if token.special)

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer | None":
        """None without a tokenizer.json: the model takes token ids only. Raises InvalidTokenizer, InvalidConfig."""
        path = folder / "tokenizer.json"
        if not path.exists():
            return None
        with open_regular(path) as file:
            check_size(path, file, MAX_TOKENIZER_BYTES)
        try:
            inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise InvalidTokenizer(f"{path} is not a readable tokenizer: {error}") from None
        inner.no_truncation()
        inner.no_padding()
        return cls(inner, _read_chat_template(folder))

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    @property
    def template_source(self) -> str:
        """The chat template as the checkpoint has it; empty for none."""
        return "" if self._chat_template is None else self._chat_template.source

    @property
    def vocab_size(self) -> int:
        """Number of ids with a text, added tokens included. The model's vocabulary may be larger."""
        return self._inner.get_vocab_size()

    def agrees(self, other: "Tokenizer") -> bool:
        """Whether both give each id the same text, so that the ids of one can be sent to the other's model."""
        return self._inner.get_vocab() == other._inner.get_vocab()

    @property
    def longest_token(self) -> int:
        """Characters of the longest token."""
        return max(map(len, self._inner.get_vocab()), default=1)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """TokenizerFailed when the library panics, as a pre-tokenizer does that backtracks too often."""
        try:
            # A batch of one: for a single text the library holds the interpreter's lock, which stops event loops.
            (encoding,) = self._inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except BaseException as error:
            if isinstance(error, Exception) or type(error).__name__ == PANIC:
                raise TokenizerFailed(f"the tokenizer fails on this text: {error!s:.{MOST_SAID}}") from None
            raise
        return encoding.ids

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_special_tokens: bool = False, **options: Any
    ) -> list[int]:
        """options: see ChatTemplate.render. ChatTemplateError when there is no template or it refuses the messages."""
        return self.encode(self.render_chat(messages, **options), add_special_tokens=add_special_tokens)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The prompt's text. options and errors as those of encode_chat()."""
        if self._chat_template is None:
            raise ChatTemplateError("the checkpoint has no chat template; send text or token ids")
        return self._chat_template.render(messages, **options)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._inner.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """The text of the token behind others; a part of a character is a replacement character.

        A decoder may drop the leading space of a first token.
        """
        once, twice = (self.decode([token_id] * count, skip_special_tokens=False) for count in (1, 2))
        return twice[len(once) :]

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 of token_text(), or the token's own bytes where it is a part of a character."""
        text, piece = self.token_text(token_id), self._inner.id_to_token(token_id)
        if piece is None or REPLACEMENT not in text:
            return text.encode()
        byte = BYTE_PIECE.fullmatch(piece)
        if byte is not None:
            return bytes.fromhex(byte[1])
        return bytes(map(BYTES.__getitem__, piece)) if BYTES.keys() >= set(piece) else text.encode()

    def stream(self, *, skip_special_tokens: bool = True) -> "TextStream":
        return TextStream(self, skip_special_tokens)


class TextStream:
    """The text of one request as its tokens come. The returned parts, joined, are the decoding of all tokens.

    A decoder may treat the first token apart (leading spaces), so a few earlier tokens are decoded along. Text that
    ends in an incomplete character is held back until its bytes come.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._context: list[int] = []
        self._held: list[int] = []
        self._emitted = 0  # characters of the decoding of context and held that were returned

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete, perhaps ""."""
        new = [token_id for token_id in token_ids if token_id not in self._skipped]
        held = self._held + new
        text = self._decode(self._context + held)
        incomplete = text.endswith(REPLACEMENT)
        if incomplete and len(new) > 1:  # a decoder may spoil what is complete with what is not
            return "".join(self.push([token_id]) for token_id in new)
        self._held = held
        if (incomplete or len(text) == self._emitted) and len(held) < HELD_TOKENS:
            return ""
        return self._emit_most(held) if incomplete else self._emit(text)

    @property
    def whole(self) -> int:
        """Characters that are held back although they are complete, with a token that ends in a part of another."""
        return len(self._decode(self._context + self._held)[self._emitted :].rstrip(REPLACEMENT)) if self._held else 0

    def flush(self) -> str:
        """The text that was held back, at the end of the request. Incomplete bytes become the replacement character."""
        return self._emit(self._decode(self._context + self._held))

    def _emit_most(self, held: list[int]) -> str:
        """All but the up to three tokens that may begin a character.

        A byte decoder replaces each byte that they spoil, so the text is shortest without them.
        """
        texts = {end: self._decode(self._context + held[:end]) for end in range(len(held), len(held) - 4, -1)}
        end = min(texts, key=lambda one: len(texts[one]))
        self._held = held[:end]
        new = self._emit(texts[end])
        self._held = held[end:]
        return new

    def _emit(self, text: str) -> str:
        """The new part of `text`. The held tokens become the context."""
        new = text[self._emitted :]
        if new:
            self._context = self._held
            self._emitted = len(self._decode(self._context))
        self._held = []
        return new

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def _read_chat_template(folder: Path) -> ChatTemplate | None:
    """chat_template.jinja, else chat_template of tokenizer_config.json: a text, or a list with one named default."""
    path = folder / "tokenizer_config.json"
    fields = Fields.from_file(path) if path.exists() else Fields({}, path.name)
    source = fields.raw("chat_template")
    if isinstance(source, list):
        named = [entry for entry in source if isinstance(entry, dict)]
        source = next((entry.get("template") for entry in named if entry.get("name") == "default"), None)
    own_file = folder / "chat_template.jinja"
    if own_file.exists():
        try:
            source = read_text(own_file, MAX_TEMPLATE_BYTES)
        except UnicodeDecodeError as error:
            raise InvalidTokenizer(f"{own_file} cannot be read: {error}") from None
    if source is None:
        return None
    if not isinstance(source, str):
        raise InvalidTokenizer(f"{fields.source}: chat_template is a {type(source).__name__}; it must be a string")
    return ChatTemplate(source, _special_tokens(fields) | _older_special_tokens(folder, fields))


def _older_special_tokens(folder: Path, fields: Fields) -> dict[str, str]:
    """The tokens of special_tokens_map.json. They precede a tokenizer_config.json that is too old for added tokens."""
    path = folder / "special_tokens_map.json"
    return {} if "added_tokens_decoder" in fields or not path.exists() else _special_tokens(Fields.from_file(path))


def _special_tokens(fields: Fields) -> dict[str, str]:
    """bos_token and its like: a string, or an object with the string as content."""
    tokens = {}
    for name in fields.names():
        value = fields.raw(name)
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens
