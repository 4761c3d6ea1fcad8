"""Compares what is read of prompts on a GPU, in chunks of several sequences, with transformers in float32."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tandem.cache.kernels.choice import choose_kernels
from tandem.workers.requests.reader import Reader, Wanted
from tandem.workers.runner.encoder_prompts import PromptChunks
from tests.support.checkpoints import make_model, sizes_on_gpu
from tests.support.oracle import random_prompt
from tests.support.prompt_programs import PromptRunner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]
LENGTHS, CHUNK = (3, 40, 97), 32
COSINE = 0.999  # of float16 with transformers' float32


def read(runner: PromptRunner, prompts: list[list[int]], wanted: Wanted) -> list[np.ndarray]:
    readers = [Reader(wanted, len(prompt)) for prompt in prompts]
    for sequence in range(len(prompts)):
        runner.cache.add_sequence(sequence)
    for begin in range(0, max(map(len, prompts)), CHUNK):
        left = [number for number, prompt in enumerate(prompts) if begin < len(prompt)]
        chunks = [np.array(prompts[number][begin : begin + CHUNK]) for number in left]
        packed = PromptChunks(left, chunks, [len(prompts[number]) for number in left])
        readings = [readers[number].reading(begin, chunk.size) for number, chunk in zip(left, chunks, strict=True)]
        pooled = runner.runner.pooled_prompts(packed, readings)
        torch.cuda.synchronize()
        values = iter(pooled.logits if wanted.token_ids else pooled.hidden)
        for number, reading in zip(left, readings, strict=True):
            if reading is not None:
                readers[number].take(next(values))
    for sequence in range(len(prompts)):
        runner.cache.remove_sequence(sequence)
    return [reader.result for reader in readers]


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt_oss"])
def test_last_states_means_and_logits(family: str, tmp_path: Path) -> None:
    model: Any = make_model(family, **sizes_on_gpu(family)).float().eval()
    model.save_pretrained(tmp_path)
    runner = PromptRunner(tmp_path, None, choose_kernels, dtype="float16", device="cuda")
    prompts = [random_prompt(length, length) for length in LENGTHS]
    with torch.inference_mode():
        outputs = [model(torch.tensor([prompt]), output_hidden_states=True) for prompt in prompts]
    hidden = [output.hidden_states[-1][0].numpy() for output in outputs]
    logits = [output.logits[0, -1, [5, 9]].numpy() for output in outputs]
    for wanted, expected in (
        (Wanted(), [one[-1] for one in hidden]),
        (Wanted(mean=True, skipped=2), [one[2:].mean(0) for one in hidden]),
    ):
        for mine, other in zip(read(runner, prompts, wanted), expected, strict=True):
            assert mine @ other / np.linalg.norm(mine) / np.linalg.norm(other) > COSINE
    for mine, other in zip(read(runner, prompts, Wanted(token_ids=(5, 9))), logits, strict=True):
        np.testing.assert_allclose(mine, other, atol=0.1)
