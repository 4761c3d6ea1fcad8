"""Requests as values: what is sent, token for token. Pure, and the same for the same seed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tandem.cluster.tools.bench.arrivals import gamma_arrivals
from tandem.cluster.tools.bench.lengths import Lengths
from tandem.cluster.tools.sample_text import SENTENCES

LOWEST_TOKEN = 10  # ids below it are often special tokens
WORDS = sorted({word.strip(".,;:?!").lower() for sentence in SENTENCES for word in sentence.split()})
PREFIX, SESSION = 1, 2  # what a stream of random numbers is for


@dataclass(frozen=True)
class Message:
    """A part of a chat. text: the server's own; None if only the tokens are known."""

    role: str
    token_ids: Sequence[int]
    text: str | None = None

    @property
    def content(self) -> str:
        """The text, or a word for each token."""
        return " ".join(WORDS[token % len(WORDS)] for token in self.token_ids) if self.text is None else self.text


@dataclass(frozen=True)
class Turn:
    """One request, which is sent with all earlier messages.

    pause: seconds from the end of the turn before. reusable: tokens at the begin of the prompt that an earlier request
    of the load had, too; the runner adds those of the chat's own history.
    """

    messages: tuple[Message, ...]
    output_tokens: int
    pause: float = 0.0
    reusable: int = 0


Session = tuple[Turn, ...]
"""The turns of a chat; a single turn if requests stand alone."""


class Sessions(Protocol):
    """The source of requests."""

    @property
    def turns(self) -> int:
        """The number of turns in each session."""
        ...

    def session(self, index: int) -> Session:
        """Returns the session that arrives as number `index`."""
        ...

    def arrivals(self, counts: Sequence[int], rate: float | None, burstiness: float) -> np.ndarray:
        """Returns the seconds to each session of a load whose parts have so many. rate: requests a second."""
        ...


@dataclass(frozen=True)
class Vocabulary:
    """Random token ids, of LOWEST_TOKEN to `size` - 1, by `seed`."""

    size: int
    seed: int

    def generator(self, *key: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, *key))

    def tokens(self, generator: np.random.Generator, count: int) -> list[int]:
        return generator.integers(min(LOWEST_TOKEN, self.size - 1), self.size, count).tolist()


@dataclass(frozen=True)
class RandomSessions:
    """Random prompts of drawn lengths, alone or as chats.

    load: number of the load, so that no two loads of a run have a prompt in common.
    prefix: tokens of a system prompt, of which there are `prefixes`; they are the same in all loads.
    turns: of a chat; pause: mean seconds that its user thinks, exponentially distributed.
    """

    prompts: Lengths
    outputs: Lengths
    vocabulary: Vocabulary
    load: int = 0
    prefix: int = 0
    prefixes: int = 1
    turns: int = 1
    pause: float = 0.0

    def session(self, index: int) -> Session:
        generator = self.vocabulary.generator(SESSION, self.load, index)
        return tuple(self._turn(index, number, generator) for number in range(self.turns))

    def arrivals(self, counts: Sequence[int], rate: float | None, burstiness: float) -> np.ndarray:
        assert rate is not None, "only a trace has a rate of its own"
        return gamma_arrivals(counts, rate / self.turns, burstiness, self.vocabulary.generator(self.load))

    def _turn(self, index: int, number: int, generator: np.random.Generator) -> Turn:
        tokens = self.vocabulary.tokens(generator, self.prompts.sample(generator))
        output = self.outputs.sample(generator)
        user = Message("user", tokens)
        if number:
            pause = float(generator.exponential(self.pause)) if self.pause else 0.0
            return Turn((user,), output, pause)
        if not self.prefix:
            return Turn((user,), output)
        which = index % self.prefixes
        system = self.vocabulary.tokens(self.vocabulary.generator(PREFIX, which), self.prefix)
        is_first = self.load == 0 and index < self.prefixes
        return Turn((Message("system", system), user), output, reusable=0 if is_first else self.prefix)
