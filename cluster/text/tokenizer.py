"""The checkpoint's tokenizer: text to token ids and back, one token at a time."""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers

from tandem.cluster.text.chat_template import MOST_SAID, ChatTemplates
from tandem.workers.checkpoint.tokenizer_files import TokenizerFiles

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
PANIC = "PanicException"  # the library's exception when it fails: it derives from BaseException only
KNOWN_TOKENS = 1 << 14  # tokens whose texts are kept: log-probabilities name the same tokens again and again
HELD_TOKENS = 16  # more than a character takes: the bytes that are still missing will not come
BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")  # a byte in the vocabulary of SentencePiece


def _byte_letters() -> Mapping[str, int]:
    """Returns the letter that stands for each byte in a byte-level vocabulary, as GPT-2 chose them."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in shown]
    letters = {chr(byte): byte for byte in shown} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}
    return MappingProxyType(letters)


BYTES = _byte_letters()


class TokenizerFailed(ValueError):
    """The tokenizer failed on a text; the error says how."""


class Tokenizer:
    """A checkpoint's tokenizer and chat templates, if any. Threads may share it. decode() may skip special_ids."""

    def __init__(self, inner: tokenizers.Tokenizer, chat_templates: ChatTemplates | None) -> None:
        self._inner = inner
        self.chat_templates = chat_templates or ChatTemplates({}, {})
        added = inner.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.special_texts = frozenset(token.content for token in added.values() if token.special)
        self.token_text = lru_cache(KNOWN_TOKENS)(self._token_text)
        """The text of a token after others; a part of a character is a replacement character.

        A decoder may drop the leading space of a first token.
        """
        self._first_length = lru_cache(KNOWN_TOKENS)(lambda token_id: self._length([token_id]))

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer | None":
        """Reads the tokenizer; None without a tokenizer.json: the model takes token ids only. Raises InvalidTokenizer,
        InvalidConfig."""
        files = TokenizerFiles.read(folder)
        if files is None:
            return None
        return cls(files.tokenizer(), ChatTemplates(files.chat_templates, files.special_tokens))

    @property
    def has_chat_template(self) -> bool:
        return bool(self.chat_templates.source)

    @property
    def template_source(self) -> str:
        """Returns all chat templates of the checkpoint; empty for none."""
        return self.chat_templates.source

    @property
    def vocab_size(self) -> int:
        """The number of ids with a text, added tokens included. The model's vocabulary may have more or fewer."""
        return self._inner.get_vocab_size()

    def agrees(self, other: "Tokenizer") -> bool:
        """Returns whether both give each id the same text, so that the ids of one can be sent to the other's model."""
        return self._inner.get_vocab() == other._inner.get_vocab()

    @property
    def longest_token(self) -> int:
        """The number of characters of the longest token."""
        return max(map(len, self._inner.get_vocab()), default=1)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encodes a text. TokenizerFailed when the library panics, as a pre-tokenizer does that backtracks too
        often."""
        try:
            # A batch of one: for a single text the library holds the interpreter's lock, which stops event loops.
            (encoding,) = self._inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except BaseException as error:
            raise _failed(error) from None
        return encoding.ids

    def encode_all(
        self, texts: Sequence[str], *, add_special_tokens: bool = True, most: int | None = None
    ) -> list[list[int]]:
        """Encodes each text as encode() does. most: of a longer text the first tokens are kept, and the special tokens
        around them, as in sentence-transformers."""
        inner = self._inner
        try:
            if most is None:
                encodings = inner.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
                return [encoding.ids for encoding in encodings]
            own = inner.num_special_tokens_to_add(is_pair=False) if add_special_tokens else 0
            encodings = inner.encode_batch_fast(list(texts), add_special_tokens=False)
            for encoding in encodings:
                encoding.truncate(max(0, most - own))
            if add_special_tokens:
                encodings = [inner.post_process(encoding) for encoding in encodings]
            return [encoding.ids[:most] for encoding in encodings]
        except BaseException as error:
            raise _failed(error) from None

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_special_tokens: bool = False, **options: Any
    ) -> list[int]:
        """Encodes a chat. options: see ChatTemplate.render. ChatTemplateError when there is no template or it refuses
        the messages."""
        return self.encode(self.render_chat(messages, **options), add_special_tokens=add_special_tokens)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Returns the prompt's text. Options and errors are those of encode_chat()."""
        return self.chat_templates.choose(options.get("tools"), options.get("variables")).render(messages, **options)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._inner.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def decoded_length(self, token_ids: Sequence[int]) -> int:
        """Returns the number of characters that they decode to, special tokens included."""
        return self._first_length(token_ids[0]) if len(token_ids) == 1 else self._length(token_ids)

    def _length(self, token_ids: Sequence[int]) -> int:
        return len(self.decode(token_ids, skip_special_tokens=False))

    def _token_text(self, token_id: int) -> str:
        once, twice = (self.decode([token_id] * count, skip_special_tokens=False) for count in (1, 2))
        return twice[len(once) :]

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the UTF-8 of token_text(), or the token's own bytes if it is a part of a character."""
        text, piece = self.token_text(token_id), self._inner.id_to_token(token_id)
        if piece is None or REPLACEMENT not in text:
            return text.encode()
        byte = BYTE_PIECE.fullmatch(piece)
        if byte is not None:
            return bytes.fromhex(byte[1])
        return bytes(map(BYTES.__getitem__, piece)) if BYTES.keys() >= set(piece) else text.encode()

    def stream(self, *, skip_special_tokens: bool = True) -> "TextStream":
        return TextStream(self, skip_special_tokens)


def _failed(error: BaseException) -> BaseException:
    """Turns an exception of the tokenizers library into an error of this package."""
    if isinstance(error, Exception) or type(error).__name__ == PANIC:
        return TokenizerFailed(f"the tokenizer fails on this text: {error!s:.{MOST_SAID}}")
    return error


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
        """Returns the text that these tokens complete, perhaps ""."""
        new = [token_id for token_id in token_ids if token_id not in self._skipped]
        held = self._held + new
        text = self._decode(self._context + held)
        incomplete = text.endswith(REPLACEMENT)
        if incomplete and len(new) > 1:  # a decoder may spoil complete characters with incomplete ones
            return "".join(self.push([token_id]) for token_id in new)
        self._held = held
        if (incomplete or len(text) == self._emitted) and len(held) < HELD_TOKENS:
            return ""
        return self._emit_most(held) if incomplete else self._emit(text)

    @property
    def whole(self) -> int:
        """Returns how many complete characters are held back, because their token ends in a part of another."""
        return len(self._decode(self._context + self._held)[self._emitted :].rstrip(REPLACEMENT)) if self._held else 0

    def flush(self) -> str:
        """Returns the text that was held back, at the end of the request. Incomplete bytes become the replacement
        character."""
        return self._emit(self._decode(self._context + self._held))

    def _emit_most(self, held: list[int]) -> str:
        """Returns all but up to three last tokens, which may begin a character.

        A byte decoder replaces each byte that they spoil, so the text is shortest without them.
        """
        texts = {end: self._decode(self._context + held[:end]) for end in range(len(held), len(held) - 4, -1)}
        end = min(texts, key=lambda one: len(texts[one]))
        self._held = held[:end]
        new = self._emit(texts[end])
        self._held = held[end:]
        return new

    def _emit(self, text: str) -> str:
        """Returns the new part of `text`. The held tokens become the context."""
        new = text[self._emitted :]
        if new:
            self._context = self._held
            self._emitted = self._tokenizer.decoded_length(self._context)
        self._held = []
        return new

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
