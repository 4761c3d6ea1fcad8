"""One prompt on its way through the worker that prefills it, and its result."""

import time
from concurrent.futures import Future
from dataclasses import dataclass, field

from tandem.cache.plan.position_map import PositionMap
from tandem.workers.requests.first_token import FirstToken
from tandem.workers.requests.prompt import Prompt
from tandem.workers.sampling.prompt_logits import PromptLogits
from tandem.workers.sampling.token_logprobs import TokenLogprobs
from tandem.workers.wire.lease import Lease
from tandem.workers.wire.prompt_spec import PromptSpec
from tandem.workers.wire.reservation import Reservation


@dataclass(frozen=True)
class PrefillResult:
    """The answer of RemoteSend. Times are in seconds.

    prefill_seconds: from the first forward until all KV is at the receiver. push_seconds: the part that only the push
    took, in calls that write, and after the first token was sampled. Writes within or during kernels take none.
    """

    first_token: int
    logprobs: TokenLogprobs | None
    cached_tokens: int
    queue_seconds: float
    prefill_seconds: float
    push_seconds: float
    bytes_pushed: int
    began_ns: int = 0  # the first forward, in Unix time
    host_cached_tokens: int = 0
    disk_cached_tokens: int = 0


@dataclass(eq=False)
class SpeculativePrompt:
    """A prompt whose first forward is launched before a receiver has room for its KV.

    It ends in one of two ways: a PrefillRequest takes over its sequence, or it is dropped.
    """

    request_id: str
    sequence_id: int
    spec: PromptSpec
    lease: Lease
    cached_tokens: int = 0  # found in the prefix index
    host_cached_tokens: int = 0  # of these, copied back from host memory
    disk_cached_tokens: int = 0  # of these, read from a disk before
    computed: int = 0  # positions whose KV is stored once the forward is done; 0 before its launch
    logits: PromptLogits | None = None  # after the last token, where the forward reaches so far
    first_token: "Future[FirstToken]" = field(default_factory=Future)  # never ends where the prompt is dropped
    started: float = field(default_factory=time.perf_counter)


@dataclass(eq=False)
class PrefillRequest(Prompt):
    """A prompt that a peer decodes, from RemoteSend until its writes are quiet."""

    reservation: Reservation
    position_map: PositionMap
    lease: Lease
    result: "Future[PrefillResult]" = field(default_factory=Future)
    first_token: "Future[FirstToken]" = field(default_factory=Future)

    @property
    def has_room(self) -> bool:
        """Whether it was begun speculatively, and so has pages."""
        return self.computed > 0

    @property
    def target(self) -> tuple[int, PositionMap, int]:
        return self.reservation.matched_tokens, self.position_map, self.reservation.target_pe

    def take_over(self, speculative: SpeculativePrompt) -> None:
        """Continues a prompt that was begun speculatively."""
        self.sequence_id, self.logits = speculative.sequence_id, speculative.logits
        self.computed, self.cached_tokens = speculative.computed, speculative.cached_tokens
        self.host_cached_tokens = speculative.host_cached_tokens
        self.disk_cached_tokens = speculative.disk_cached_tokens
        self.first_token = speculative.first_token
        self.arrived = self.started = speculative.started

    def completed(self) -> PrefillResult:
        """Makes the result, now that all KV is at the receiver."""
        now, first = time.perf_counter(), self.first_token.result(0)
        return PrefillResult(
            first_token=first.token_id,
            logprobs=first.logprobs,
            cached_tokens=self.cached_tokens,
            host_cached_tokens=self.host_cached_tokens,
            disk_cached_tokens=self.disk_cached_tokens,
            queue_seconds=self.started - self.arrived,
            prefill_seconds=now - self.started,
            push_seconds=self.push_seconds + now - self.sampled_at,
            bytes_pushed=self.bytes_pushed,
            began_ns=time.time_ns() - int((now - self.started) * 1e9),
        )
