"""One prompt on its way through a prefill worker, and what comes of it."""

import time
from concurrent.futures import Future
from dataclasses import dataclass, field

from torch import Tensor

from tandem.cache.plan.arrays import Int64Array
from tandem.cache.plan.position_map import PositionMap
from tandem.workers.prefill.first_token import FirstToken
from tandem.workers.prefill.speculative_prefill import Head
from tandem.workers.sampling.sampling_params import SamplingParams
from tandem.workers.sampling.token_logprobs import TokenLogprobs
from tandem.workers.wire.lease import Lease
from tandem.workers.wire.reservation import Reservation


@dataclass(frozen=True)
class PrefillResult:
    """What RemoteSend answers; seconds.

    prefill_seconds: from the first forward until all KV had landed. push_seconds: what of it the push took by itself,
    in calls that write, and from the sampled token on; writes beside or within kernels that compute take none.
    """

    first_token: int
    logprobs: TokenLogprobs | None
    cached_tokens: int
    queue_seconds: float
    prefill_seconds: float
    push_seconds: float
    bytes_pushed: int


@dataclass(eq=False)
class PrefillRequest:
    """computed counts positions whose KV is in the cache here, or will be once the forwards launched so far are done.

    marked: the cache knows where it goes. logits: [1, vocab], where all was launched before the reservation came.
    sampled is the time of the first token, which is in drawn from then on.
    """

    request_id: str
    sequence_id: int
    token_ids: Int64Array
    params: SamplingParams
    reservation: Reservation
    position_map: PositionMap
    lease: Lease
    result: "Future[PrefillResult]" = field(default_factory=Future)
    logits: Tensor | None = None
    marked: bool = False
    computed: int = 0
    cached_tokens: int = 0
    arrived: float = field(default_factory=time.perf_counter)
    started: float = 0.0
    sampled: float = 0.0
    push_seconds: float = 0.0
    bytes_pushed: int = 0
    drawn: "Future[FirstToken]" = field(default_factory=Future)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def destination(self) -> tuple[int, PositionMap, int]:
        """From which position on its KV goes where."""
        return self.reservation.matched_tokens, self.position_map, self.reservation.target_pe

    def take_over(self, head: Head) -> None:
        """Goes on from a prompt that is begun."""
        self.sequence_id, self.logits = head.sequence_id, head.logits
        self.computed, self.cached_tokens, self.drawn = head.computed, head.cached_tokens, head.drawn
        self.arrived = self.started = head.started

    def landed(self) -> PrefillResult:
        """The result, now that all KV has landed."""
        now, first = time.perf_counter(), self.drawn.result(0)
        return PrefillResult(
            first_token=first.token_id,
            logprobs=first.logprobs,
            cached_tokens=self.cached_tokens,
            queue_seconds=self.started - self.arrived,
            prefill_seconds=now - self.started,
            push_seconds=self.push_seconds + now - self.sampled,
            bytes_pushed=self.bytes_pushed,
        )
