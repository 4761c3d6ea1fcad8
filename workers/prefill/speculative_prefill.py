"""A prompt that is begun while a decode worker is still being asked for room."""

import logging
import time
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from tandem.cache.paged_cache import PagedKVCache
from tandem.cache.plan.arrays import Int64Array
from tandem.workers.prefill.first_token import FirstToken
from tandem.workers.runner.model_runner import ModelRunner
from tandem.workers.wire.lease import Clock, Lease

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Head:
    """A prompt without a place to land, of which cached_tokens were found in the prefix index.

    computed: positions whose KV is in the cache once its forward is done, 0 before it is launched. logits: [1, vocab],
    behind the last token, where that forward reaches so far. drawn: never ends where the prompt is dropped.
    """

    request_id: str
    sequence_id: int
    token_ids: Int64Array
    lease: Lease
    cached_tokens: int = 0
    computed: int = 0
    logits: Tensor | None = None
    drawn: "Future[FirstToken]" = field(default_factory=Future)
    started: float = field(default_factory=time.perf_counter)


class HeadStart:
    """At most one prompt, whose first forward is computed and written to nobody. Owned by the step thread.

    Its pages are for whoever has a place to land, should that one need them: drop() is right at any time, for work of
    this device that still uses them comes before all that is launched later.
    """

    def __init__(
        self,
        runner: ModelRunner,
        cache: PagedKVCache,
        *,
        max_batch_tokens: int,
        sharing: bool,
        lease_seconds: float,
        clock: Clock,
    ) -> None:
        self._runner = runner
        self._cache = cache
        self._max_batch_tokens = max_batch_tokens
        self._sharing = sharing
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._head: Head | None = None

    @property
    def request_id(self) -> str | None:
        """Whose prompt it is; None without one."""
        return None if self._head is None else self._head.request_id

    def take(self, request_id: str, sequence_id: int, token_ids: Int64Array) -> "Future[FirstToken] | None":
        """Launches the prompt's first forward; what is drawn behind the prompt, once it is claimed and that far.

        None, and nothing happens, when there is a prompt already, or no room. Where that fails, the prompt is computed
        with its place known.
        """
        cache = self._cache
        if self._head is not None or not cache.has_room(len(token_ids), self._max_batch_tokens):
            return None
        head = self._head = Head(request_id, sequence_id, token_ids, Lease(self._lease_seconds, self._clock))
        try:
            cache.add_sequence(sequence_id)
            if self._sharing:
                head.cached_tokens = cache.match_prefix(sequence_id, token_ids)
            cache.reserve(sequence_id, len(token_ids), self._max_batch_tokens)
            self._compute(head)
        except Exception:
            log.exception("computing the prompt of %r ahead of its reservation failed", head.request_id)
            self.drop()
        return head.drawn

    def claim(self, request_id: str, token_ids: Int64Array) -> Head | None:
        """The prompt, whose sequence is the caller's from now on; None where it is another."""
        head = self._head
        if head is None or head.request_id != request_id:
            return None
        if not np.array_equal(head.token_ids, token_ids):
            self.drop()
            return None
        self._head = None
        return head

    def expire(self) -> None:
        if self._head is not None and self._head.lease.is_over:
            self.drop()

    def drop(self) -> bool:
        """Forgets the prompt and lets go of its pages, which are in the prefix index then; whether there was one."""
        head, self._head = self._head, None
        if head is None:
            return False
        try:
            if self._sharing and head.computed:  # it may be asked for again, once there is room for it
                self._cache.publish_prefix(head.sequence_id, head.token_ids[: head.computed])
        finally:
            self._cache.remove_sequence(head.sequence_id)
        return True

    def _compute(self, head: Head) -> None:
        whole = len(head.token_ids)
        end = min(whole, head.cached_tokens + self._max_batch_tokens)
        tokens = head.token_ids[head.cached_tokens : end]
        logits = self._runner.prompts([head.sequence_id], [tokens], [whole], push=False)
        head.computed = end
        if end == whole:
            head.logits = logits
