"""Forwards of prompts, chunk by chunk, and how the KV that they compute goes to its receivers."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from tandem.cache.paged_cache import PagedKVCache
from tandem.workers.model_runner import ModelRunner
from tandem.workers.prefill_request import PrefillRequest
from tandem.workers.push_meter import PushMeter

Chunks = list[tuple[PrefillRequest, int]]
"""Requests, and how many tokens of each come next."""


class PromptForwards:
    """Used by the owner of the cache.

    Requests that share a forward send what it computes token by token, as it is appended. A request that is alone goes
    page to page, each chunk behind its forward, beside the next: stores to a peer slow a forward more than copies do.
    Where the transport can, all layers of a chunk but the last go while that is computed.
    """

    def __init__(self, runner: ModelRunner, cache: PagedKVCache, meter: PushMeter) -> None:
        self._runner = runner
        self._cache = cache
        self._meter = meter

    def launch(self, chunks: Chunks, *, alone: bool) -> tuple[list[PrefillRequest], Tensor]:
        """Computes, or at least launches, one chunk of each request, and sends it; those that have come to their end,
        and their logits [n, vocab]. alone: nobody else runs or waits."""
        cache, requests = self._cache, [request for request, _ in chunks]
        for request in requests:
            self._mark(request)
        if alone:
            self._send(requests[0])  # of what was computed before it was known where to
        seconds_before = self._meter.seconds
        plan = cache.begin_forward(
            [request.sequence_id for request in requests],
            [length for _, length in chunks],
            [request.num_tokens for request in requests],
            push=not alone,
        )
        tokens, num_rows, last_rows, ending = [], 0, [], []
        for request, length in chunks:
            tokens.append(request.token_ids[request.computed : request.computed + length])
            num_rows += length
            request.computed += length
            if request.computed == request.num_tokens:
                last_rows.append(num_rows - 1)
                ending.append(request)
        logits = self._runner.forward(np.concatenate(tokens), plan, np.array(last_rows, np.int64))
        cache.end_forward(plan)
        self._count_pushed(requests, self._meter.seconds - seconds_before)
        if alone:
            self._send(requests[0])
        return ending, logits

    def send_head(self, request: PrefillRequest) -> None:
        """Sends a prompt that was launched as a whole before it was known where to."""
        self._mark(request)
        self._send(request)

    def _mark(self, request: PrefillRequest) -> None:
        if not request.marked:
            self._cache.mark_send(request.sequence_id, *request.destination)
            request.marked = True

    def _send(self, request: PrefillRequest) -> None:
        """What is launched and not sent."""
        seconds_before = self._meter.seconds
        self._cache.send_cached(request.sequence_id)
        self._count_pushed([request], self._meter.seconds - seconds_before)

    def _count_pushed(self, requests: Sequence[PrefillRequest], seconds: float) -> None:
        """Shares out the seconds of calls that wrote for them, by the bytes that were sent since."""
        sent = [self._cache.bytes_sent(request.sequence_id) for request in requests]
        pushed = sum(sent) - sum(request.bytes_pushed for request in requests)
        for request, total in zip(requests, sent, strict=True):
            if pushed:
                request.push_seconds += seconds * (total - request.bytes_pushed) / pushed
            request.bytes_pushed = total
