"""Models for a pair of workers on GPUs, and what is asked of each pair."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.gpu.worker_pair import MAX_TOKENS, PAGE, Pair
from tests.support.checkpoints import make_model, sizes_on_gpu
from tests.support.oracle import random_prompt

LAYERS = 3
PROMPT = random_prompt(6 * PAGE + 5, 0)


@dataclass(frozen=True)
class Case:
    """fields: of the model's configuration; settings: of both WorkerConfigs; token_bytes: of KV, in all layers."""

    model: str
    fields: dict[str, int]
    settings: dict[str, Any]
    token_bytes: int

    def save(self, folder: Path) -> Path:
        make_model(self.model, num_hidden_layers=LAYERS, **self.fields).save_pretrained(folder)
        return folder


def llama(head_dim: int, element_bytes: int, **settings: Any) -> Case:
    return Case("llama", {"head_dim": head_dim}, settings, LAYERS * 2 * 2 * head_dim * element_bytes)


FP8: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3", "k_scale": 0.02, "v_scale": 0.01}
CASES = {
    "bf16-128": llama(128, 2, dtype="bfloat16"),
    # One chunk, and pages of 768 KiB: prompts of check_long are runs whose first layers go before the last is stored.
    "bf16-128-long-runs": Case(
        "llama",
        {"head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 32},
        {"dtype": "bfloat16", "max_batch_tokens": 256},
        LAYERS * 2 * 32 * 128 * 2,
    ),
    "bf16-64": llama(64, 2, dtype="bfloat16"),
    "fp16-128": llama(128, 2, dtype="float16"),
    "fp8-128": llama(128, 1, **FP8),
    "latents": Case("deepseek_v2", sizes_on_gpu("deepseek_v2"), {"dtype": "bfloat16"}, LAYERS * (512 + 64) * 2),
    "fp8-latents": Case(
        "deepseek_v2",
        sizes_on_gpu("deepseek_v2"),
        {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"},
        LAYERS * (512 + 4 * 4 + 64 * 2),
    ),
}


def check_push(pair: Pair, token_bytes: int) -> None:
    """PROMPT, first while its last chunk is computed, then from what the sender keeps; both go page to page."""
    for request_id, cached in (("computed", 0), ("cached", len(PROMPT) // PAGE * PAGE)):
        answer, slots = pair.push(request_id, PROMPT)
        assert answer.cached_tokens == cached
        assert answer.bytes_pushed == len(PROMPT) * token_bytes
        assert answer.push_seconds > 0
        _check_arrived(pair, PROMPT, slots)
        pair.abort(request_id)


def check_push_of_many(pair: Pair, token_bytes: int) -> None:
    """Prompts at once: page to page where a graph computes them, else token by token what is computed beside others."""
    _check_many(pair, token_bytes, range(1, 6))
    pair.prefill.do("swap_prompt_graphs")
    _check_many(pair, token_bytes, range(6, 11))
    pair.prefill.do("swap_prompt_graphs")


def _check_many(pair: Pair, token_bytes: int, seeds: Sequence[int]) -> None:
    prompts = {f"one of many {seed}": random_prompt(6 * PAGE + seed, seed) for seed in seeds}
    with ThreadPoolExecutor(len(prompts)) as calls:
        answers = list(calls.map(pair.push, *zip(*prompts.items(), strict=True)))
    for (request_id, prompt), (answer, slots) in zip(prompts.items(), answers, strict=True):
        assert answer.bytes_pushed == len(prompt) * token_bytes
        _check_arrived(pair, prompt, slots)
        pair.abort(request_id)


def check_announced(pair: Pair, token_bytes: int) -> None:
    """Prompts that the sender has begun before it knows where they go."""
    # The last token of a prompt is never found in the prefix index.
    for length in (PAGE + 4, 2 * PAGE - 1, 6 * PAGE + 3):
        prompt = random_prompt(length, length)
        answer, slots = pair.push(f"announced {length}", prompt, announced=True)
        assert answer.bytes_pushed == length * token_bytes
        _check_arrived(pair, prompt, slots)
        pair.abort(f"announced {length}")


def check_long(pair: Pair, token_bytes: int) -> None:
    """Prompts alone, of one chunk each, begun before it is known where they go, and after."""
    for announced in (False, True):
        for length in (11 * PAGE + 9, 15 * PAGE + 7):
            request_id, prompt = f"long {length} {announced}", random_prompt(length, length + announced)
            answer, slots = pair.push(request_id, prompt, announced=announced)
            assert answer.bytes_pushed == length * token_bytes
            _check_arrived(pair, prompt, slots)
            pair.abort(request_id)


def _check_arrived(pair: Pair, prompt: Sequence[int], slots: np.ndarray) -> None:
    """slots: where the decode worker has it."""
    arrived = pair.decode.do("at_slots", slots)
    computed = pair.prefill.do("at_slots", pair.prefill.do("slots_of_prefix", prompt))
    assert len(arrived) == len(computed) > 0
    for there, here in zip(arrived, computed, strict=True):
        whole = len(prompt) // PAGE * PAGE
        assert here.shape[0] == whole
        assert here.any()
        assert np.array_equal(there[:whole], here)
        assert there[whole:].any()


def tokens_after(pair: Pair, request_id: str) -> list[int]:
    """Returns the decode worker's tokens for PROMPT, after the first token."""
    reservation = pair.prepare(request_id, PROMPT)
    pair.send(request_id, PROMPT, reservation)
    tokens = pair.start(request_id, reservation)
    assert len(tokens) == MAX_TOKENS - 1
    return tokens
