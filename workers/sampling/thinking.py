"""Free text that a model writes between two tags, before the text that follows a grammar."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLTokenizer

ANYTHING = r"/(.|\n)*/"
LINE_ENDS = r"/\n{0,2}/"  # which models write after the last tag


@dataclass(frozen=True)
class Thinking:
    """The tags. opened: the prompt ends in the first one; else the output may begin with it, or with what follows the
    grammar."""

    begin: str
    end: str
    opened: bool = False


def behind(thinking: Thinking, grammar: str, tokenizer: "LLTokenizer") -> str:
    """llguidance's grammar of an output that thinks and then follows `grammar`. No end token is free text.

    A grammar of both, rather than a state next to the matcher: each place in the output follows from its tokens alone.
    ValueError for a text that is no grammar.
    """
    end = _symbol(thinking.end, tokenizer)
    if end.startswith("<"):  # a token of its own, and never text
        thought = f"reasoning {end} line_ends\nreasoning: {ANYTHING}"
    else:
        thought = f"reasoning line_ends\nreasoning[suffix={end}]: {ANYTHING}"
    start = "thought @guide" if thinking.opened else f"@guide | {_symbol(thinking.begin, tokenizer)} thought @guide"
    lark = f"start: {start}\nthought: {thought}\nline_ends: {LINE_ENDS}\n"
    guide, *others = _parts(grammar)
    return json.dumps({"grammars": [{"name": "main", "lark_grammar": lark}, guide | {"name": "guide"}, *others]})


def _parts(grammar: str) -> list[dict[str, Any]]:
    """Returns the parts of a grammar in Lark, or in llguidance's JSON: at least one."""
    if not grammar.lstrip().startswith("{"):
        return [{"lark_grammar": grammar}]
    held = json.loads(grammar)
    parts = held.get("grammars") if isinstance(held, dict) else None
    if not isinstance(parts, list) or not parts or not isinstance(parts[0], dict):
        raise ValueError("it has no list of grammars")
    return parts


def _symbol(tag: str, tokenizer: "LLTokenizer") -> str:
    """The tag in Lark: a text, or a token that llguidance takes for no text."""
    ids = tokenizer.tokenize_str(tag, parse_special=True)
    return f"<[{ids[0]}]>" if len(ids) == 1 and tokenizer.is_special_token(ids[0]) else json.dumps(tag)


class ThinkingLimit:
    """Ends one row's thinking: after so many output tokens it writes the last tag. A function of the tokens alone."""

    def __init__(self, thinking: Thinking, max_tokens: int, tokenizer: "LLTokenizer") -> None:
        """max_tokens: 0 sets no limit."""
        self._tokenizer = tokenizer
        self._begin, self._end = thinking.begin.encode(), thinking.end.encode()
        self._end_ids = tokenizer.tokenize_str(thinking.end, parse_special=True)
        self._max_tokens = max_tokens
        self._thinks = thinking.opened
        self._may_begin = not thinking.opened
        self._text = b""  # since the last tag may have begun
        self._num_tokens = 0
        self._num_written = 0  # of the last tag's tokens

    def take(self, tokens: Sequence[int]) -> None:
        """Extends the output by these tokens."""
        for token in tokens:
            if self._thinks or self._may_begin:
                self._take(token)

    @property
    def next_token(self) -> int | None:
        """The only token that may come next; None where others may, too."""
        if not self._thinks or not self._max_tokens or self._num_tokens < self._max_tokens:
            return None
        return self._end_ids[self._num_written]

    def _take(self, token: int) -> None:
        self._num_written = self._num_written + 1 if token == self.next_token else 0
        self._num_tokens += 1
        self._text += self._tokenizer.decode_bytes([token])
        if self._may_begin:
            self._thinks = self._text.startswith(self._begin)
            self._may_begin = not self._thinks and self._begin.startswith(self._text)
        elif self._end in self._text:
            self._thinks = False
        else:
            self._text = self._text[-len(self._end) :]
