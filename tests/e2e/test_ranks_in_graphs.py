"""Ranks whose steps overlap and are in graphs, as on a GPU: here a graph computes again what was captured."""

import inspect
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from tandem.cache.kernels import choice
from tandem.workers.runner.model_runner import ModelRunner
from tests.cache.table_kernels import TableKernels
from tests.e2e.test_ranks import is_idle, shape_of
from tests.support.client_requests import GREEDY, complete, complete_all, tokens_of
from tests.support.island import running_island
from tests.support.likely_drafters import make_head, make_llama, make_mtp, make_smaller
from tests.support.oracle import random_prompt
from tests.support.prompt_programs import RunInOnePlace
from tests.support.waiting import until

CAPTURES = ("steps", "prompts", "verification", "drafts", "steps_with_prompts")
OUTPUT = 40
PROMPTS = [random_prompt(length, seed=length, vocab_size=512) for length in (3, 20, 45, 70, 100)]
SETTINGS = {"scheduler.max_sequences": 8}


@pytest.fixture(autouse=True)
def _graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "KV_BACKENDS", MappingProxyType({"table": TableKernels}))
    for name in CAPTURES:
        monkeypatch.setattr(ModelRunner, f"capture_{name}", with_capture(getattr(ModelRunner, f"capture_{name}")))


def with_capture(method: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(method)

    def capturing(*arguments: Any, **named: Any) -> None:
        bound = signature.bind(*arguments, **named)
        bound.arguments["capture"] = bound.arguments.get("capture") or RunInOnePlace()
        method(*bound.args, **bound.kwargs)

    return capturing


@pytest.mark.gate("ngram-1+2")
@pytest.mark.parametrize(("prefill", "decode"), [(2, 2), (1, 2)], ids=["2+2", "1+2"])
@pytest.mark.parametrize("method", ["none", "ngram", "draft_model", "mtp", "eagle3"])
def test_tokens_are_those_of_one_rank(method: str, prefill: int, decode: int, tmp_path: Path) -> None:
    """A lone request has its first step prepared ahead. Then all come at once, with cancelled requests, on workers of
    both roles."""
    model = (make_mtp if method == "mtp" else make_llama)(tmp_path / "model")
    with running_island(model) as plain:
        due = complete_all(plain.address, PROMPTS, max_tokens=OUTPUT, **GREEDY)
    settings: dict[str, Any] = {**SETTINGS, "scheduler.roles": "adaptive", "scheduler.token_seconds": 0.5}
    if method != "none":
        settings |= {"speculation.method": method, "speculation.tokens": 3, "speculation.max_step_tokens": 24}
    if method in ("draft_model", "eagle3"):
        make = make_smaller if method == "draft_model" else make_head
        settings["speculation.draft"] = str(make(tmp_path / "draft", model))
    with running_island(model, shape_of(prefill, decode) | settings) as island, island.client() as client:
        for prompt, tokens in zip(PROMPTS[:2], due[:2], strict=True):
            assert tokens_of(complete(island.address, prompt, max_tokens=OUTPUT, **GREEDY)) == tokens
        cancelled = client.generate(PROMPTS[3], max_tokens=60, **GREEDY)
        next(cancelled)
        cancelled.close()
        assert complete_all(island.address, PROMPTS * 2, max_tokens=OUTPUT, **GREEDY) == due * 2
        leader = island.workers[0]
        assert leader._loop is not None
        assert leader._loop.engine.capabilities.overlaps
        assert all(worker.lost == "" for worker in island.workers)
        until(lambda: is_idle(island))
