"""Tokens sampled after work that no decode graph holds: a prompt's, or an eager step's."""

from functools import partial

import torch
from torch import Tensor

from tandem.cache.plan.arrays import Int32Array, Int64Array
from tandem.workers.kernels.choice import choose_sampler
from tandem.workers.runner.logits_processor import LogitsProcessor
from tandem.workers.runner.step_inputs import NUM_SAMPLING, pack_sampling, unpack_sampling
from tandem.workers.sampling.pending_samples import CopiedSamples, LateSamples, PendingSamples
from tandem.workers.sampling.posted_samples import PostBox, half_of
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.sampling.token_logprobs import logprobs_of

FEWEST_ROWS = 16
PROMPT_SECONDS = 600.0


class EagerSampler:
    """One kernel reads its parameters from the host's memory and posts the tokens there, so that no copy stands
    before or after it: copies wait for those that push KV. Owned by one thread, on whose current stream all is queued.
    """

    def __init__(self, device: torch.device, processor: LogitsProcessor | None = None) -> None:
        """processor: of rows with rules, None for one of its own."""
        self._device = device
        self._processor = processor or LogitsProcessor(device)
        self._make_room(FEWEST_ROWS)

    @torch.inference_mode()  # whatever the caller's: room that was made in this mode is written to in no other
    def sample(
        self, logits: Tensor, sampling: SampleBatch, positions: Int64Array, masks: Int32Array | None = None
    ) -> PendingSamples:
        """A token for each row of logits [n, vocab], which are of 16 bits or float32; positions [n]: its index in its
        sequence. It depends on the row's logits, parameters, seed and position; with LogitRules also on the tokens
        before it. masks: of guided rows, see masks_of()."""
        rows = logits.shape[0]
        if rows > self._last.shape[0]:
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()  # what is under way has the memory there is
            self._make_room(2 * rows)
        ticket = self._posts.next_ticket()
        inputs, tickets, parameters = self._halves[half_of(ticket)]
        inputs[:, :rows] = pack_sampling(ticket, sampling, positions)
        if sampling.rules is None:
            self._sampler.sample(logits, parameters, self._last, tickets, self._posts.words)
        else:
            processed = self._processor.process(logits, sampling.rules, positions, masks)
            self._sampler.sample(processed.logits, parameters, self._last, tickets, self._posts.words)
            self._processor.count(processed, self._last)
        posted = self._posts.expect(ticket, rows)
        logprobs = logprobs_of(logits, self._last, sampling.num_logprobs)
        return posted if logprobs is None else CopiedSamples(self._last[:rows], logprobs)

    def sample_step(self, logits: Tensor, sampling: SampleBatch, positions: Int64Array) -> PendingSamples:
        """Samples a step like sample(); LateSamples where rows are guided."""
        if sampling.is_guided:
            return LateSamples(partial(self.sample, logits, sampling, positions))
        return self.sample(logits, sampling, positions)

    @property
    def sampled(self) -> Tensor:
        """int64 [n or more], on the device: what the last sample() gives. The next one writes over it."""
        return self._last

    def _make_room(self, num_rows: int) -> None:
        on_gpu = self._device.type == "cuda"
        self._sampler = choose_sampler(num_rows, self._device)
        self._posts = PostBox(num_rows, self._device, seconds=PROMPT_SECONDS)
        inputs = torch.zeros((2, NUM_SAMPLING, num_rows), dtype=torch.int64, pin_memory=on_gpu)
        self._halves = [(half.numpy(), *unpack_sampling(half)) for half in inputs]
        self._last = torch.zeros(num_rows, dtype=torch.int64, device=self._device)
