"""Grammars that a request's output has to follow, compiled by llguidance."""

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tandem.cache.plan.arrays import Int32Array
from tandem.workers.checkpoint.errors import ModelError
from tandem.workers.checkpoint.tokenizer_files import TokenizerFiles
from tandem.workers.sampling.closed_schema import closed
from tandem.workers.sampling.idle_keywords import without_idle
from tandem.workers.sampling.property_names import with_properties
from tandem.workers.sampling.schema_references import with_pointers
from tandem.workers.sampling.thinking import Thinking, ThinkingLimit, behind

if TYPE_CHECKING:
    from llguidance import GrammarFormat, LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions
    from tokenizers import Tokenizer

KINDS: "dict[str, GrammarFormat]" = {  # llguidance's names
    "json_schema": "json_schema",
    "regex": "regex",
    "grammar": "gbnf",
    "choice": "choice",
}
MOST_CACHED = 32  # compiled grammars; one may take 30 MiB
THREADS = max(2, min(16, (os.cpu_count() or 1) // 2))  # that compute masks for the step thread
MASK_SECONDS = 1.0  # a mask takes some ten microseconds; llguidance gives up one of some ten milliseconds
COMPILE_FUEL = 200_000  # some 0.1 s and 30 MiB: llguidance looks ahead in what is repeated often
MOST_SYMBOLS = 100_000
MOST_KEPT = 1024  # output tokens that thinking leaves to what follows a guide
LOOK_AHEAD = 64  # tokens; llguidance goes on compiling with each
MOST_SPACES = 100  # tokens of white space
WHITESPACE = r"[ \t\r\n]{1,32}"  # between two tokens of JSON; without a bound some models write spaces for ever

MOST_SAID = 300  # characters of an error
TOO_COMPLEX = "it is too complex; use fewer repetitions and alternatives"
IN_WORDS = {  # by what llguidance's errors have
    "NoExtensionBias": "no text follows it, such as where it refers to itself and never ends",
    "too big (limit": TOO_COMPLEX,
    "grammar size": TOO_COMPLEX,
    "schema too large": TOO_COMPLEX,
    "too many states": TOO_COMPLEX,
    "too many expressions": TOO_COMPLEX,
}


class InvalidGuide(ValueError):
    """A grammar that cannot be compiled, or no way to compile any; the text says which."""


class GuideNotFollowed(ValueError):
    """The output's tokens are not of the grammar's, as where a peer that sampled them was told another one."""


@dataclass(frozen=True)
class Guided:
    """The grammar that the output has to follow. texts: one, of choice several."""

    kind: str  # of KINDS
    texts: tuple[str, ...]
    thinking: Thinking | None = None  # what may stand before it
    thinking_tokens: int = field(default=0, compare=False)  # output tokens after which thinking ends; 0: no limit

    def within(self, max_tokens: int) -> "Guided":
        """Returns the guide with a limit of its thinking, if it has none, so that tokens are left for what follows the
        guide."""
        if self.thinking is None or self.thinking_tokens:
            return self
        return replace(self, thinking_tokens=max(1, max_tokens - min(max_tokens * 3 // 4, MOST_KEPT)))

    def shortened(self, before: int, max_tokens: int) -> "Guided":
        """Returns the guide of a request that now has fewer output tokens. before: the max_tokens of within()."""
        free = replace(self, thinking_tokens=0)
        given = self.thinking_tokens != free.within(before).thinking_tokens
        return self if given else free.within(max_tokens)


class Grammars:
    """Compiles grammars for one tokenizer, and keeps the latest. Any thread may use it."""

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """folder: of the checkpoint, whose tokenizer is read when the first grammar comes. vocab_size: the model's;
        the tokenizer may have more ids or fewer."""
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[Guided, LLMatcher] = OrderedDict()
        self._pool: ThreadPoolExecutor | None = None

    def compile(self, guided: Guided) -> "LLMatcher":
        """A matcher of its own at the grammar's beginning. Takes up to seconds the first time; InvalidGuide."""
        with self._lock:
            matcher = self._compiled.get(guided)
            if matcher is None:
                matcher = self._compiled[guided] = self._compile(guided)
            self._compiled.move_to_end(guided)
            if len(self._compiled) > MOST_CACHED:
                self._compiled.popitem(last=False)
            return matcher.deep_copy()

    def check(self, guided: Guided) -> None:
        """Compiles the guide, without keeping the grammar. InvalidGuide also where a text that follows it gets too
        complex within a few tokens. For one thread."""
        matcher = self._compile(guided)
        for _ in range(LOOK_AHEAD):
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            if matcher.is_error():
                raise InvalidGuide(f"{guided.kind} cannot be followed: {_in_words(matcher.get_error())}")
            token = self._next_token(np.flatnonzero(np.unpackbits(mask, bitorder="little")))
            if token is None:
                return
            matcher.consume_token(token)

    def _next_token(self, allowed: NDArray[np.intp]) -> int | None:
        """Returns the first allowed token that ends nothing, and is more than white space if possible."""
        assert self._tokenizer is not None, "a grammar has been compiled"
        tokens = [int(token) for token in allowed[:MOST_SPACES] if token not in self._eos_token_ids]
        written = (token for token in tokens if self._tokenizer.decode_bytes([token]).strip())
        return next(written, tokens[0] if tokens else None)

    def constraint(self, guided: Guided) -> "Constraint":
        """Makes the constraint of one row; raises as compile()."""
        matcher, limit = self.compile(guided), None
        with self._lock:
            self._pool = self._pool or ThreadPoolExecutor(THREADS, "masks")
            if guided.thinking is not None and self._tokenizer is not None:
                limit = ThinkingLimit(guided.thinking, guided.thinking_tokens, self._tokenizer)
            return Constraint(matcher, self._pool, self._vocab_size, limit)

    def close(self) -> None:
        """Ends the threads. Constraints are not used after it."""
        with self._lock:
            if self._pool is not None:
                self._pool.shutdown(wait=False, cancel_futures=True)

    def _compile(self, guided: Guided) -> "LLMatcher":
        from llguidance import LLMatcher, LLParserLimits, grammar_from

        tokenizer = self._tokenizer = self._tokenizer or self._read_tokenizer()
        text = json.dumps(guided.texts) if guided.kind == "choice" else guided.texts[0]
        try:
            if guided.kind == "json_schema":
                schema = closed(with_properties(without_idle(with_pointers(_schema_of(text)))))
                grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=_spacing(schema))
            else:
                grammar = grammar_from(KINDS[guided.kind], text)
            if guided.thinking is not None:
                grammar = behind(guided.thinking, grammar, self._tokenizer)
        except (ValueError, RecursionError) as error:
            raise InvalidGuide(f"{guided.kind} cannot be read: {_in_words(str(error))}") from None
        limits = LLParserLimits(initial_lexer_fuel=COMPILE_FUEL, max_grammar_size=MOST_SYMBOLS, verbose_errors=False)
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # much is compiled now only, such as rules that nothing ends
        if matcher.is_error():
            raise InvalidGuide(f"{guided.kind} cannot be compiled: {_in_words(matcher.get_error())}")
        return matcher

    def _read_tokenizer(self) -> "LLTokenizer":
        from llguidance import LLTokenizer

        try:
            files = TokenizerFiles.read(self._folder)
            tokenizer = None if files is None else files.tokenizer()
        except ModelError as error:
            raise InvalidGuide(f"the checkpoint's tokenizer cannot be read: {error}") from None
        if tokenizer is None or not self._eos_token_ids:
            raise InvalidGuide("grammars need a tokenizer.json and an end token, and the checkpoint lacks one of them")
        serialized, size = _within(tokenizer, self._vocab_size)
        try:
            return LLTokenizer(serialized, size, list(self._eos_token_ids))
        except ValueError as error:
            raise InvalidGuide(f"llguidance cannot use the checkpoint's tokenizer: {error}") from None


def _within(tokenizer: "Tokenizer", vocab_size: int) -> tuple[str, int]:
    """Returns the tokenizer as JSON, without added tokens beyond vocab_size, and the number of ids that tokenizer and
    model share.

    llguidance writes text that is certain in the tokens that the tokenizer makes of it. What is left beyond vocab_size
    is of tokenizer.json's own vocabulary; Constraint forbids it.
    """
    serialized, own = tokenizer.to_str(), tokenizer.get_vocab(with_added_tokens=False)
    if tokenizer.get_vocab_size() > vocab_size:
        parts = json.loads(serialized)
        parts["added_tokens"] = [token for token in parts["added_tokens"] if token["id"] < vocab_size]
        serialized = json.dumps(parts)
    return serialized, max(vocab_size, 1 + max(own.values(), default=0))


def _schema_of(text: str) -> dict[str, Any]:
    """Reads a schema. true is the schema of anything, false of nothing. Raises ValueError."""
    schema = json.loads(text)
    if isinstance(schema, bool):
        return {} if schema else {"enum": []}
    if not isinstance(schema, dict):
        raise ValueError(f"it is {text.strip()}; an object, true and false are JSON schemas")
    return schema


def _spacing(schema: object) -> "JsonCompileOptions":
    """Returns options for white space between two tokens, unless the schema has its own."""
    options = schema.get("x-guidance") if isinstance(schema, dict) else None
    says = isinstance(options, dict) and not options.keys().isdisjoint(("whitespace_pattern", "whitespace_flexible"))
    return {} if says else {"whitespace_pattern": WHITESPACE}


class Constraint:
    """One row's place in its grammar. Owned by the step thread; masks are computed on another one."""

    def __init__(
        self, matcher: "LLMatcher", pool: ThreadPoolExecutor, vocab_size: int, limit: ThinkingLimit | None = None
    ) -> None:
        self._matcher = matcher
        self._limit = limit
        self._pool = pool
        self._words = -(-vocab_size // 32)
        self._last = (1 << (vocab_size - 1) % 32 + 1) - 1  # those bits of the last word that stand for a token
        self._mask: Future[Int32Array] | None = None
        self.consumed = 0  # output tokens
        self.error: Exception | None = None
        """The reason why there are no more masks: the request has to end."""

    def follow(self, output: Sequence[int]) -> None:
        """The output has grown by these tokens, or begins with them. The next mask is computed from now on."""
        before, tokens = self._mask, [int(token) for token in output]
        self.consumed += len(tokens)

        def next_mask() -> Int32Array:
            if before is not None:
                before.result(MASK_SECONDS)
            return self._next_mask(tokens)

        self._mask = self._pool.submit(next_mask)

    def mask(self) -> Int32Array:
        """Returns the mask of the next token, as LogitRules.allowed; all tokens are allowed if there is an error. Waits
        for it."""
        if self._mask is None:
            self.follow(())
        assert self._mask is not None
        try:
            return self._mask.result(MASK_SECONDS)
        except Exception as error:
            self.error = error
            error.__traceback__ = None  # the future keeps the error, and with it the frames of a whole step
            return np.full(self._words, -1, np.int32)

    def _next_mask(self, tokens: list[int]) -> Int32Array:
        matcher = self._matcher
        if tokens:
            matcher.consume_tokens(tokens)
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint32)[: self._words].copy()
        if matcher.is_error():
            raise GuideNotFollowed(f"the output cannot follow it: {_in_words(matcher.get_error())}")
        mask[-1] &= self._last
        if not mask.any():
            raise GuideNotFollowed("the output cannot follow it: the model has no token that may come next")
        allowed = mask.view(np.int32)
        return allowed if self._limit is None else self._limited(self._limit, tokens, allowed)

    def _limited(self, limit: ThinkingLimit, tokens: list[int], mask: Int32Array) -> Int32Array:
        """The mask without all but the token that ends the thinking, where it is time for it and it may stand here."""
        limit.take(tokens)
        token = limit.next_token
        if token is None:
            return mask
        only = np.zeros_like(mask)
        only[token // 32] = np.array(1 << token % 32, np.uint32).view(np.int32)
        return only if (mask & only).any() else mask


def masks_of(constraints: Iterable[Constraint | None]) -> Int32Array:
    """[g, ⌈vocab/32⌉], of the g rows that have a constraint, at least one, in their order: what may come next in each,
    as LogitRules.allowed. Waits for it."""
    return np.stack([one.mask() for one in constraints if one is not None])


def _in_words(error: str) -> str:
    """Returns llguidance's message without the names of its parts: one line of at most MOST_SAID characters."""
    said = next((words for name, words in IN_WORDS.items() if name in error), error.partition("<non-verbose")[0])
    said = " ".join(said.split())
    return said if len(said) <= MOST_SAID else f"{said[: MOST_SAID - 2]} …"
