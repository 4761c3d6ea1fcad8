"""The sequences that a decode worker steps together, as arrays: a step costs no Python loop over them to plan."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tandem.transfer.completion import Signal
from tandem.workers.finish import FinishReason, FinishRule
from tandem.workers.sample_batch import SampleBatch
from tandem.workers.sampling_params import SamplingParams
from tandem.workers.token_stream import TokenStream

NO_TOKEN = -1


@dataclass(eq=False)
class DecodeRequest:
    """One sequence on a decode worker, from its reservation to its last token."""

    request_id: str
    sequence_id: int
    prompt: list[int]
    signal: Signal
    expected_tokens: int
    params: SamplingParams | None = None
    rule: FinishRule | None = None
    stream: TokenStream | None = None
    landed: bool = False
    output: list[int] = field(default_factory=list)


class DecodeBatch:
    """Rows are rebuilt when a request joins or leaves, and only advanced in between.

    sequence_ids, tokens (the next input), lengths (positions whose KV is stored) and remaining (output tokens still
    allowed): int64 [n]. stop_ids: int64 [n, k], rows filled up with NO_TOKEN.
    """

    def __init__(self) -> None:
        self.requests: list[DecodeRequest] = []
        self._rebuild()

    def __len__(self) -> int:
        return len(self.requests)

    def change(self, joining: Sequence[DecodeRequest], leaving: Sequence[DecodeRequest]) -> None:
        gone = set(map(id, leaving))
        self.requests = [request for request in self.requests if id(request) not in gone] + list(joining)
        self._rebuild()

    def advance(self, sampled: NDArray[np.int64]) -> NDArray[np.int64]:
        """Takes one sampled token a row, int64 [n]; the FinishReason of each row, int64 [n]."""
        self.tokens = sampled
        self.lengths += 1
        self.remaining -= 1
        reasons = np.where(self.remaining <= 0, FinishReason.LENGTH, FinishReason.RUNNING)
        stopped = (self.stop_ids == sampled[:, None]).any(axis=1)
        return np.where(stopped, FinishReason.STOP, reasons).astype(np.int64)

    def _rebuild(self) -> None:
        rows = self.requests
        rules = [request.rule for request in rows if request.rule is not None]
        self.sequence_ids = np.array([request.sequence_id for request in rows], np.int64)
        self.ones = np.ones(len(rows), np.int64)
        self.tokens = np.array([request.output[-1] for request in rows], np.int64)
        outputs = np.array([len(request.output) for request in rows], np.int64)
        self.lengths = np.array([len(request.prompt) for request in rows], np.int64) + outputs - 1
        self.remaining = np.array([rule.max_tokens for rule in rules], np.int64) - outputs
        width = max((len(rule.stop_ids) for rule in rules), default=0)
        self.stop_ids = np.full((len(rows), width), NO_TOKEN, np.int64)
        for row, rule in enumerate(rules):
            self.stop_ids[row, : len(rule.stop_ids)] = sorted(rule.stop_ids)
        self.sampling = SampleBatch.from_params([request.params for request in rows if request.params is not None])
