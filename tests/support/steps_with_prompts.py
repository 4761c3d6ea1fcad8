"""Decode steps, one with prompt chunks, in its forward or after it."""

from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tandem.cache.kernels.base import KernelFactory
from tandem.workers.runner.forward_graphs import Capture
from tandem.workers.runner.model_runner import PromptChunks
from tandem.workers.runner.step_inputs import ON_HOST, StepInputs
from tandem.workers.sampling.pending_samples import PendingSamples, Samples
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.sampling.sampling_params import SamplingParams
from tests.support.oracle import random_prompt
from tests.support.prompt_programs import PromptRunner
from tests.support.whole_prompts import compute_prompts

DECODED = (0, 1, 2)
CHUNKS = {3: (0, 21), 4: (10, 30), 5: (0, 12)}  # of prompts of 30 tokens: 3 and 5 go on, 4 ends
LENGTH, STEPS = 30, 4
DRAWN = SamplingParams(temperature=0.9, top_k=20, seed=5, logprobs=2)


class Beside:
    """Four steps of three sequences. With the third step come prompt chunks, in its forward or in a forward of their
    own."""

    def __init__(
        self,
        folder: Path,
        *,
        capture: Capture | None,
        together: bool,
        params: SamplingParams,
        kernels: KernelFactory,
        dtype: str = "float32",
        device: str = "cpu",
    ) -> None:
        """capture: steps overlap, and are in graphs; None: they are eager. together: in one forward."""
        overlaps = capture is not None
        self._of = PromptRunner(folder, None, kernels, dtype=dtype, device=device)
        self.runner, self.cache = self._of.runner, self._of.cache
        if capture is not None:
            self.runner.capture_steps(8, capture)
            self.runner.capture_prompts(128, capture)
            self.runner.capture_steps_with_prompts(capture)
            assert self.runner.takes_prompts(range(8), len(CHUNKS), 128)
            assert not self.runner.takes_prompts(range(9), len(CHUNKS), 128)
            assert not self.runner.takes_prompts(range(8), len(CHUNKS), 129)
        for sequence in (*DECODED, *CHUNKS):
            self.cache.add_sequence(sequence)
        for sequence in DECODED:
            self._of.forward({sequence: random_prompt(9 + sequence, sequence)}, {sequence: 9 + sequence})
        begun = {sequence: begin for sequence, (begin, _) in CHUNKS.items() if begin}
        for sequence, begin in begun.items():
            self._of.forward({sequence: random_prompt(LENGTH, sequence)[:begin]}, {sequence: LENGTH})
        self._sampling = SampleBatch.from_params([params] * len(DECODED))
        self.samples: list[Samples] = []
        self.logits = torch.empty(0)
        pending: list[PendingSamples] = []
        for step in range(STEPS):
            first = step == 0 or not overlaps
            tokens = np.array([7] * 3 if step == 0 else self.samples[-1].token_ids if first else [0] * 3)
            inputs = StepInputs(
                tokens,
                np.full(3, ON_HOST) if first else np.arange(3),
                self._sampling,
                np.array([self.cache.num_tokens(sequence) + 1 for sequence in DECODED]),
            )
            pending.append(self._launch(inputs, step == 2, together))
            if not overlaps:
                self.samples.append(pending.pop().wait())
        self.samples += [one.wait() for one in pending[-2:]] if overlaps else []

    def _launch(self, inputs: StepInputs, with_prompts: bool, together: bool) -> PendingSamples:
        chunks = [np.array(random_prompt(LENGTH, sequence)[begin:end]) for sequence, (begin, end) in CHUNKS.items()]
        prompts = PromptChunks(list(CHUNKS), chunks, [LENGTH] * len(CHUNKS))
        if with_prompts and together:
            pending, self.logits = self.runner.step_with_prompts(DECODED, inputs, prompts)
            return pending
        pending = self.runner.step(DECODED, *inputs)
        if with_prompts:
            self.logits = compute_prompts(self.runner, *prompts, push=False)
        return pending

    def kv(self) -> list[Tensor]:
        layers = [
            self.cache.gather_kv(one, self.cache.first_position(one), self.cache.num_tokens(one))
            for one in (*DECODED, *CHUNKS)
        ]
        return list(chain.from_iterable(chain.from_iterable(layers)))
