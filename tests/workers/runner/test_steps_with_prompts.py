"""A decode step and prompt chunks in one forward give what a step and a forward of prompts give apart."""

from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.workers.runner.model_runner import PromptChunks
from tandem.workers.runner.step_inputs import ON_HOST, StepInputs
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.sampling.sampling_params import SamplingParams
from tests.cache.table_kernels import TableKernels
from tests.support.checkpoints import save_checkpoint
from tests.support.oracle import random_prompt
from tests.support.prompt_programs import PromptRunner, run_in_place

FAMILIES = ["qwen3", "gemma3", "gpt_oss", "qwen3_moe"]
DECODED = (0, 1, 2)
CHUNKS = {3: (0, 21), 4: (10, 30), 5: (0, 12)}  # of prompts of 30 tokens: 3 and 5 go on, 4 ends
LENGTH, STEPS = 30, 4
DRAWN = SamplingParams(temperature=0.9, top_k=20, seed=5, logprobs=2)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


class Beside:
    """Four steps of three sequences; with the third one come prompt chunks, in its forward or in one of their own."""

    def __init__(self, folder: Path, *, overlaps: bool, together: bool, params: SamplingParams) -> None:
        self._of = PromptRunner(folder, None, TableKernels)
        self.runner, self.cache = self._of.runner, self._of.cache
        if overlaps:
            self.runner.capture_steps(8, run_in_place)
            self.runner.capture_prompts(128, run_in_place)
            self.runner.capture_steps_with_prompts(run_in_place)
            assert self.runner.takes_prompts(8, len(CHUNKS), 128)
            assert not self.runner.takes_prompts(9, len(CHUNKS), 128)
            assert not self.runner.takes_prompts(8, len(CHUNKS), 129)
        for sequence in (*DECODED, *CHUNKS):
            self.cache.add_sequence(sequence)
        for sequence in DECODED:
            self._of.forward({sequence: random_prompt(9 + sequence, sequence)}, {sequence: 9 + sequence})
        begun = {sequence: begin for sequence, (begin, _) in CHUNKS.items() if begin}
        for sequence, begin in begun.items():
            self._of.forward({sequence: random_prompt(LENGTH, sequence)[:begin]}, {sequence: LENGTH})
        self._sampling = SampleBatch.from_params([params] * len(DECODED))
        self.samples, self.logits = [], torch.empty(0)
        pending = []
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

    def _launch(self, inputs: StepInputs, with_prompts: bool, together: bool):  # noqa: ANN202
        chunks = [np.array(random_prompt(LENGTH, sequence)[begin:end]) for sequence, (begin, end) in CHUNKS.items()]
        prompts = PromptChunks(list(CHUNKS), chunks, [LENGTH] * len(CHUNKS))
        if with_prompts and together:
            pending, self.logits = self.runner.step_with_prompts(DECODED, inputs, prompts)
            return pending
        pending = self.runner.step(DECODED, *inputs)
        if with_prompts:
            self.logits = self.runner.prompts(*prompts, push=False)
        return pending

    def kv(self) -> list[Tensor]:
        layers = [
            self.cache.gather_kv(one, self.cache.first_position(one), self.cache.num_tokens(one))
            for one in (*DECODED, *CHUNKS)
        ]
        return list(chain.from_iterable(chain.from_iterable(layers)))


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("overlaps", [False, True])
def test_one_forward_gives_what_two_give(folder: Path, overlaps: bool, params: SamplingParams) -> None:
    both = [Beside(folder, overlaps=overlaps, together=together, params=params) for together in (True, False)]
    together, apart = both
    assert together.runner.overlaps is overlaps
    assert [one.token_ids.tolist() for one in together.samples] == [one.token_ids.tolist() for one in apart.samples]
    assert together.logits.shape == (1, apart.logits.shape[1])
    torch.testing.assert_close(together.logits, apart.logits, rtol=1e-4, atol=1e-4)
    for mine, other in zip(together.kv(), apart.kv(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)
