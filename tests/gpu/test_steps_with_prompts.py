"""A decode step and prompt chunks in one CUDA graph, against a step and a forward of prompts."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tandem.cache.kernels.choice import choose_kernels
from tandem.workers.runner.forward_graphs import GraphCapture
from tandem.workers.runner.model_runner import PromptChunks
from tandem.workers.runner.step_inputs import ON_HOST, StepInputs
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.sampling.sampling_params import SamplingParams
from tests.support.checkpoints import make_model, sizes_on_gpu
from tests.support.oracle import random_prompt
from tests.support.prompt_programs import PromptRunner
from tests.support.steps_with_prompts import Beside
from tests.support.whole_prompts import compute_prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]
GREEDY = SamplingParams(temperature=0)
MOSTLY, ALIKE = 0.8, 0.98  # of a deep model in bfloat16: tokens that are the same, cosine of logits


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt_oss", "llama4"])
def test_one_graph_gives_what_two_give(family: str, tmp_path: Path) -> None:
    make_model(family, **sizes_on_gpu(family)).save_pretrained(tmp_path)
    together, apart = (
        Beside(
            tmp_path,
            capture=GraphCapture(),
            together=each,
            params=GREEDY,
            kernels=choose_kernels,
            dtype="bfloat16",
            device="cuda",
        )
        for each in (True, False)
    )
    assert together.logits.shape == (1, apart.logits.shape[1])
    torch.testing.assert_close(together.logits.float(), apart.logits.float(), rtol=0.05, atol=0.15)
    for mine, other in zip(together.kv(), apart.kv(), strict=True):
        torch.testing.assert_close(mine.float(), other.float(), rtol=0.05, atol=0.1)


# As many heads as make FlashInfer take the kernels that serve large models.
DEEP = {
    "num_hidden_layers": 12, "hidden_size": 256, "head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip


class Joint:
    """One step of 20 rows beside a chunk of a prompt, of 12 layers; again and again from the same state."""

    ROWS, LENGTH, STORED, CHUNK = 20, 50, 60, 150

    def __init__(self, folder: Path) -> None:
        self._of = PromptRunner(folder, None, choose_kernels, dtype="bfloat16", device="cuda")
        self._runner, self._cache = self._of.runner, self._of.cache
        self._runner.capture_steps(self.ROWS)
        self._runner.capture_prompts(256)
        self._runner.capture_steps_with_prompts()
        self._rows = tuple(range(self.ROWS))
        for sequence in (*self._rows, self.ROWS):
            self._cache.add_sequence(sequence)
        for sequence in self._rows:
            length = self.LENGTH + sequence % 7
            self._of.forward({sequence: random_prompt(length, sequence)}, {sequence: length})
        self._prompt = np.array(random_prompt(self.STORED + self.CHUNK, self.ROWS))
        self._of.forward({self.ROWS: self._prompt[: self.STORED].tolist()}, {self.ROWS: self._prompt.size})
        self._sampling = SampleBatch.from_params([SamplingParams(temperature=0, logprobs=3)] * self.ROWS)

    def launch(self, *, together: bool) -> tuple[list[int], list[dict[int, float]], torch.Tensor]:
        """Tokens and best log-probabilities of the rows, logits after the prompt."""
        positions = np.array([self._cache.num_tokens(one) + 1 for one in self._rows])
        inputs = StepInputs(np.full(self.ROWS, 7), np.full(self.ROWS, ON_HOST), self._sampling, positions)
        prompts = PromptChunks([self.ROWS], [self._prompt[self.STORED :]], [self._prompt.size])
        if together:
            assert self._runner.takes_prompts(self._rows, 1, self.CHUNK)
            pending, logits = self._runner.step_with_prompts(self._rows, inputs, prompts)
        else:
            pending = self._runner.step(self._rows, *inputs)
            logits = compute_prompts(self._runner, *prompts, push=False)
        samples = pending.wait()
        for sequence in self._rows:
            self._cache.pop(sequence, 1)
        self._cache.pop(self.ROWS, self.CHUNK)
        return samples.token_ids.tolist(), [dict(one.top) for one in samples.logprobs if one is not None], logits


def test_the_two_attentions_of_a_layer_do_not_race(tmp_path: Path) -> None:
    """Each replay gives the same bits, whatever else the device does at the time. They are close to the results of
    two graphs, one after the other."""
    make_model("qwen3", **DEEP).save_pretrained(tmp_path)
    joint, noise = Joint(tmp_path), torch.cuda.Stream()
    tokens, best, logits = joint.launch(together=True)
    other_tokens, _, other_logits = joint.launch(together=False)
    assert np.mean(np.array(tokens) == other_tokens) >= MOSTLY
    assert torch.cosine_similarity(logits.float(), other_logits.float()).item() >= ALIKE
    matrix = torch.randn(1024, 1024, device="cuda")
    for number in range(60):
        with torch.cuda.stream(noise):
            for _ in range(number % 7):
                torch.mm(matrix, matrix)
        again = joint.launch(together=True)
        assert again[:2] == (tokens, best), f"launch {number}"
        assert torch.equal(again[2], logits), f"launch {number}"
