"""Traces in Mooncake's public format: a JSON object a line, with timestamp, input_length, output_length, hash_ids.

timestamp is in milliseconds, lengths are in tokens. A hash id names a block of 512 tokens of the prompt: equal ids are
equal blocks, and blocks are equal only where those before them are. The last block may be a part of one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tandem.cluster.errors import UsageError
from tandem.cluster.tools.bench.arrivals import scaled_arrivals
from tandem.cluster.tools.bench.lengths import MOST_TOKENS
from tandem.cluster.tools.bench.sessions import Message, Session, Turn, Vocabulary

BLOCK = 512
MOST_LINES = 1 << 20
HASHED, UNHASHED = 3, 4  # what a stream of random numbers is for


class Line(BaseModel):
    """One request of a trace. Fields of other names are ignored."""

    model_config = ConfigDict(frozen=True)

    timestamp: float = Field(ge=0)
    input_length: int = Field(ge=1, le=MOST_TOKENS)
    output_length: int = Field(ge=1, le=MOST_TOKENS)
    hash_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()

    @model_validator(mode="after")
    def _blocks(self) -> "Line":
        if len(self.hash_ids) > -(-self.input_length // BLOCK):
            raise ValueError(
                f"hash_ids has {len(self.hash_ids)} blocks; input_length {self.input_length} has "
                f"{-(-self.input_length // BLOCK)} of {BLOCK}"
            )
        return self


def read_trace(path: Path, most_tokens: int | None = None) -> tuple[list[Line], int]:
    """Returns the trace's requests in the order of their times, and how many were left out.

    A request is left out if its prompt and output together have more than `most_tokens`. Raises UsageError, which names
    the line.
    """
    lines, number = list[Line](), 0
    try:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                if number > MOST_LINES:
                    raise UsageError(f"--trace {path} has more than {MOST_LINES} lines, the most that are allowed")
                if text.strip():
                    lines.append(Line.model_validate_json(text))
    except ValidationError as error:
        raise UsageError(f"--trace {path}, line {number}: {_finding(error.errors()[0])}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--trace {path}: {error}") from None
    kept = [line for line in lines if most_tokens is None or line.input_length + line.output_length <= most_tokens]
    if not kept:
        raise UsageError(f"--trace {path} has {len(lines)} requests, none within {most_tokens} tokens; one is needed")
    return sorted(kept, key=lambda line: line.timestamp), len(lines) - len(kept)


def _finding(found: Any) -> str:
    where = ".".join(map(str, found["loc"]))
    return f"{where} is {found['input']!r:.80}: {found['msg']}" if where else f"{found['msg']}"


@dataclass(frozen=True)
class TraceSessions:
    """The requests of a trace. Prompt tokens without a hash id are unique."""

    lines: list[Line]
    vocabulary: Vocabulary
    load: int = 0
    turns: int = 1

    def session(self, index: int) -> Session:
        line = self.lines[index]
        tokens: list[int] = []
        for block in line.hash_ids:
            tokens += self.vocabulary.tokens(self.vocabulary.generator(HASHED, self.load, block), BLOCK)
        del tokens[line.input_length :]
        rest = self.vocabulary.generator(UNHASHED, self.load, index)
        tokens += self.vocabulary.tokens(rest, line.input_length - len(tokens))
        return (Turn((Message("user", tokens),), line.output_length, reusable=self._reusable[index]),)

    def arrivals(self, counts: Sequence[int], rate: float | None, burstiness: float) -> np.ndarray:
        """Returns the arrivals. burstiness is the trace's own."""
        return scaled_arrivals(np.array([line.timestamp for line in self.lines[: sum(counts)]]) / 1e3, rate)

    @cached_property
    def _reusable(self) -> list[int]:
        """Returns for each prompt the tokens of its first blocks that an earlier prompt had."""
        seen: set[int] = set()
        reusable = []
        for line in self.lines:
            known = next((place for place, block in enumerate(line.hash_ids) if block not in seen), len(line.hash_ids))
            reusable.append(min(known * BLOCK, line.input_length))
            seen.update(line.hash_ids)
        return reusable
