"""Speculative prefill: a prompt's first forward, launched while a decode worker is still asked for room."""

import logging
from concurrent.futures import Future

import numpy as np

from tandem.workers.config import LoopSettings
from tandem.workers.engine.admission import Admission, MostBytes, any_number
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.step import Step
from tandem.workers.handoff.retired import RetiredSequences
from tandem.workers.logs import of_requests
from tandem.workers.requests.first_token import FirstToken
from tandem.workers.requests.prefill_request import SpeculativePrompt
from tandem.workers.requests.sequence_ids import SequenceIds
from tandem.workers.runner.encoder_prompts import PromptChunks
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.sampling.sampling_params import SamplingParams
from tandem.workers.wire.lease import WRITER_FRACTION, Clock, Lease
from tandem.workers.wire.prompt_spec import PromptSpec

log = logging.getLogger(__name__)
GREEDY = SampleBatch.from_params([SamplingParams(temperature=0)])


class SpeculativePrefill:
    """Computes at most one prompt, whose KV is written to nobody. Owned by the step thread.

    A prompt with a reservation may need its pages: drop() is right at any time. Pages that its forward may still write
    to are free once the device is past it.
    """

    def __init__(
        self,
        engine: Engine,
        retired: RetiredSequences,
        ids: SequenceIds,
        settings: LoopSettings,
        clock: Clock,
        most_bytes: MostBytes = any_number,
    ) -> None:
        self._engine = engine
        self._most_bytes = most_bytes
        self._retired = retired
        self._ids = ids
        self._max_batch_tokens = settings.max_batch_tokens
        self._sharing = settings.sharing
        self._lease_seconds = settings.lease_seconds * WRITER_FRACTION
        self._clock = clock
        self._prompt: SpeculativePrompt | None = None
        self.computed_tokens = 0  # so far

    @property
    def request_id(self) -> str | None:
        """The prompt's request id; None without a prompt."""
        return None if self._prompt is None else self._prompt.request_id

    def take(self, request_id: str, spec: PromptSpec) -> "Future[FirstToken] | None":
        """Launches the prompt's first forward; the token sampled after the prompt, once it is claimed and that far.

        None, and nothing happens, when there is a prompt already, or no room. Where the launch fails, the prompt is
        computed once it has its reservation.
        """
        engine, size = self._engine, len(spec)
        fits = engine.room(size, self._max_batch_tokens, spec.encoder.length).fits and engine.has_slot(spec.adapter)
        if self._prompt is not None or not fits:
            return None
        lease = Lease(self._lease_seconds, self._clock)
        prompt = self._prompt = SpeculativePrompt(request_id, self._ids.take(), spec, lease)
        try:
            most_bytes = self._most_bytes()
            asked = Admission(spec, size, self._max_batch_tokens, self._sharing, most_bytes=most_bytes)
            prompt.cached_tokens = engine.admit(prompt.sequence_id, asked)
            begun = engine.sequence(prompt.sequence_id)
            prompt.host_cached_tokens, prompt.disk_cached_tokens = begun.num_fetched, begun.num_lifted
            self._compute(prompt)
        except Exception:
            log.exception("a speculative prefill failed", extra=of_requests(prompt))
            self.drop()
        return prompt.first_token

    def claim(self, request_id: str, spec: PromptSpec) -> SpeculativePrompt | None:
        """The prompt, whose sequence is the caller's from now on; None where it is another."""
        prompt = self._prompt
        if prompt is None or prompt.request_id != request_id:
            return None
        alike = (prompt.spec.salt, prompt.spec.encoder) == (spec.salt, spec.encoder)
        if not alike or not np.array_equal(prompt.spec.token_ids, spec.token_ids):
            self.drop()
            return None
        self._prompt = None
        return prompt

    def expire(self) -> None:
        if self._prompt is not None and self._prompt.lease.is_over:
            self.drop()

    def drop(self) -> bool:
        """Lets go of the prompt's pages, which may become a prefix; whether there was a prompt."""
        prompt, self._prompt = self._prompt, None
        if prompt is None:
            return False
        try:
            if self._sharing and prompt.computed:  # it may be asked for again, once there is room for it
                spec = prompt.spec
                if prompt.logits is not None and self._engine.capabilities.drafts:  # what a head computes is left
                    self._engine.sample(prompt.logits, GREEDY, np.array([len(spec)]))
                self._engine.publish(prompt.sequence_id, spec.token_ids[: prompt.computed], spec.salt)
        finally:
            self._retired.add(prompt.sequence_id)
        return True

    def _compute(self, prompt: SpeculativePrompt) -> None:
        whole = len(prompt.spec)
        end = min(whole, prompt.cached_tokens + self._max_batch_tokens)
        tokens = prompt.spec.token_ids[prompt.cached_tokens : end]
        chunks = PromptChunks([prompt.sequence_id], [tokens], [whole])
        logits = self._engine.launch(Step(chunks=chunks)).prompts
        prompt.computed = end
        self.computed_tokens += len(tokens)
        if end == whole:
            prompt.logits = logits
