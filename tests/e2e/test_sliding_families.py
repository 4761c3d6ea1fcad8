"""Requests to models with windows, chunks and latents slide as StreamingLLM over transformers does."""

from functools import partial
from pathlib import Path

import pytest

from tests.support.checkpoints import save_checkpoint
from tests.support.client_requests import GREEDY, complete_all
from tests.support.island import running_island
from tests.support.oracle import greedy, load_oracle, random_prompt
from tests.support.sliding_oracle import slide_greedily

PROMPTS = [random_prompt(length, seed=length) for length in (2, 31, 55, 90)]
OUTPUT, WINDOW, SINKS = 90, 30, 3


@pytest.mark.gate("gemma3")
@pytest.mark.parametrize(
    "case", ["gemma3", "deepseek_v3", "gpt_oss", "llama4", "mistral-window", "gemma2", "deepseek_v2", "gemma4"]
)
def test_answers_go_beyond_the_context(case: str, tmp_path: Path) -> None:
    """Layers see 24 positions, chunks of 32, or all that is kept."""
    folder = save_checkpoint(case, tmp_path)
    oracle = load_oracle(folder)
    settings = {
        "model.max_model_len": 128,
        "cache.page_size": 8,
        "cache.num_pages": 96,
        "island.verify_kv": True,
        "scheduler.max_batch_tokens": 40,
    }
    window = {"window": WINDOW, "sinks": SINKS}
    with running_island(folder, settings) as island:
        send = partial(complete_all, island.address, max_tokens=OUTPUT, **GREEDY)
        found, plain = send(PROMPTS, sliding=window), send(PROMPTS[:2])
        assert send(PROMPTS, sliding=window) == found  # with the prefixes of the first time
    assert found == [slide_greedily(oracle, prompt, OUTPUT, WINDOW, SINKS) for prompt in PROMPTS]
    assert plain == [greedy(oracle, prompt, OUTPUT) for prompt in PROMPTS[:2]]
