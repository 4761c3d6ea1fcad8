"""Finds where tokens begin in their text."""

from tandem.cluster.text.tokenizer import REPLACEMENT, Tokenizer


class TokenOffsets:
    """The offsets of one text's tokens, which come in order. Tokens of one character all begin where it begins."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        begin: int = 0,
        skip_special_tokens: bool = False,
        text: str | None = None,
    ) -> None:
        """begin: characters before the first token. text: the whole text, if it is known: special tokens that are
        missing there are no part of it. Without a tokenizer tokens make no text."""
        self._tokenizer = tokenizer
        self._stream = None if tokenizer is None else tokenizer.stream(skip_special_tokens=skip_special_tokens)
        self._text = text
        self._length = begin  # of the text that the stream has given

    def next(self, token_id: int) -> int:
        """Returns the number of characters before the token. A token that is no part of the text begins where the next
        one does."""
        if self._tokenizer is None or self._stream is None:
            return self._length
        before, own = self._length + self._stream.whole, self._tokenizer.token_text(token_id)
        is_special = token_id in self._tokenizer.special_ids
        if is_special and self._text is not None and not self._text.startswith(own, before):
            return before
        self._length += len(self._stream.push([token_id]))
        # Held bytes that became replacement characters come before a whole token.
        return before if REPLACEMENT in own else max(before, self._length - len(own))
