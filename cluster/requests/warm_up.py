"""Sends the gateway's own requests through new workers, so that clients' first requests find everything ready."""

import asyncio
import itertools
import logging
import time
from collections.abc import Sequence

import numpy as np

from tandem.cluster.errors import CallError, WorkerCallError
from tandem.cluster.requests.fair_turns import FairTurns
from tandem.cluster.requests.generation import Generation
from tandem.cluster.requests.validation import ModelLimits, ValidRequest
from tandem.cluster.routing.islands import Islands, LinkPair
from tandem.cluster.routing.router import Router
from tandem.proto import inference_pb2
from tandem.workers.sampling.sampling_params import SamplingParams
from tandem.workers.wire.prompt_spec import NO_ENCODER, EncoderPrompt, PromptSpec

log = logging.getLogger(__name__)

MOST_SECONDS = 60.0
LENGTHS = (8, 64, 256, 1024, 4096, 8192)  # of prompts that come one by one: each kind of forward, and of push
TOGETHER = (100, 200, 300)  # of prompts that share forwards
NUM_TOKENS = 4
PARAMS = (
    SamplingParams(max_tokens=NUM_TOKENS, temperature=0, seed=0, ignore_eos=True),
    SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=0, ignore_eos=True),
    SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8, seed=0, logprobs=1, ignore_eos=True),
)
FAILURES = (CallError, WorkerCallError, TimeoutError)


class WarmUp:
    """Compiles, connects and allocates what the first requests would. All is done once run() returns. Used on the event
    loop."""

    def __init__(self, islands: Islands, router: Router, limits: ModelLimits, *, local: bool) -> None:
        """local: whether workers compute prompts that they decode themselves."""
        self._islands = islands
        self._router = router
        self._limits = limits
        self._local = local
        self._turns = FairTurns(1)
        self._numbers = itertools.count(1)

    async def run(self, island: str) -> None:
        """Sends some requests through each pair of the island's workers. Failures are logged: clients lose nothing."""
        try:
            async with asyncio.timeout(MOST_SECONDS):
                for pair in self._pairs(island):
                    await self._warm(pair)
        except* FAILURES as failed:  # one error, or the errors of requests that were sent together
            log.warning("island %s is not warm: %s", island, str(failed.exceptions[0]) or "it took too long")

    def _pairs(self, island: str) -> list[LinkPair]:
        links = [link for (name, _), link in self._islands.links().items() if name == island]
        pairs = [
            LinkPair(decode, prefill, 0.0)
            for decode, prefill in itertools.product(links, links)
            if (decode is prefill and self._local) or (prefill.role, decode.role) == ("prefill", "decode")
        ]
        return sorted(pairs, key=lambda pair: pair.decode is pair.prefill)

    async def _warm(self, pair: LinkPair) -> None:
        for length, params in itertools.zip_longest(LENGTHS, PARAMS, fillvalue=None):
            await self._send(pair, length or LENGTHS[0], params or PARAMS[0])
        await self._send_together(pair, TOGETHER)

    async def _send_together(self, pair: LinkPair, lengths: Sequence[int]) -> None:
        async with asyncio.TaskGroup() as group:
            for length in lengths:
                group.create_task(self._send(pair, length, PARAMS[0]))

    async def _send(self, pair: LinkPair, length: int, params: SamplingParams) -> None:
        """Sends one request with a new prompt, or none if the workers could not hold it."""
        number = next(self._numbers)
        encoder = NO_ENCODER
        if self._limits.max_encoder_tokens:
            encoder = EncoderPrompt(self._limits.page_size, self._limits.page_size)
        if encoder.border + length + NUM_TOKENS > self._limits.longest:
            return
        token_ids = np.random.default_rng(number).integers(0, self._limits.vocab_size, encoder.border + length)
        request = ValidRequest(f"warm-up-{number}", PromptSpec(token_ids, encoder=encoder), params)
        generation = Generation(request, time.perf_counter(), None, (), self._turns)
        asked = request.request_id, request.prompt, params.max_tokens, ""
        placement = await self._router.place(*asked, again=True, move=pair)
        try:
            await generation.run(placement, MOST_SECONDS, _drop)
        finally:
            await asyncio.shield(self._router.give_back(placement, generation.complete))


async def _drop(message: inference_pb2.GenerateResponse) -> None:
    """Drops an answer, which nobody reads."""
