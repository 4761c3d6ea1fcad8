"""Tests what the gateway sends through new workers before it is ready."""

from pathlib import Path

import pytest

from tandem.cluster.errors import WorkerUnreachable
from tandem.cluster.requests import warm_up
from tandem.cluster.routing.islands import LinkPair
from tandem.workers.sampling.sampling_params import SamplingParams
from tests.support.checkpoints import save_checkpoint
from tests.support.client_requests import GREEDY, complete, tokens_of
from tests.support.island import running_island
from tests.support.oracle import greedy, load_oracle, random_prompt
from tests.support.tvm_cache import TvmCache


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("qwen3", tmp_path_factory.mktemp("warm"))


def test_every_pair_has_computed_before_the_island_is_ready(folder: Path) -> None:
    """Nothing of it is left: pages are free, and tokens are those of transformers."""
    shape = {"island.num_prefill": 2, "island.num_decode": 2, "gateway.warm_up": True}
    prompt = random_prompt(20, seed=1)
    with running_island(folder, shape) as island:
        for worker in island.workers:
            assert worker.on_step_thread(lambda worker=worker: TvmCache.of(worker.cache).is_empty)
            assert worker.on_step_thread(lambda worker=worker: worker.cache.pages.cached) > 0
        with island.client() as client:
            info = client.cluster_info()
        assert info.active == info.queued == 0
        assert tokens_of(complete(island.address, prompt, max_tokens=8, **GREEDY)) == greedy(
            load_oracle(folder), prompt, 8
        )


def test_workers_that_hold_no_long_prompt_are_warm_without(folder: Path) -> None:
    with running_island(folder, {"gateway.warm_up": True, "cache.num_pages": 9}) as island:
        assert complete(island.address, [5, 6, 7], max_tokens=2, **GREEDY)


def test_a_worker_that_is_lost_among_requests_sent_together_is_logged(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    send = warm_up.WarmUp._send

    async def lost(self: warm_up.WarmUp, pair: LinkPair, length: int, params: SamplingParams) -> None:
        if length in warm_up.TOGETHER:
            raise WorkerUnreachable("prefill worker (PE 0, epoch 1) answered UNAVAILABLE: lost")
        await send(self, pair, length, params)

    monkeypatch.setattr(warm_up.WarmUp, "_send", lost)
    with running_island(folder, {"gateway.warm_up": True}) as island:
        assert complete(island.address, [5, 6, 7], max_tokens=2, **GREEDY)
    assert "is not warm: prefill worker (PE 0, epoch 1) answered UNAVAILABLE: lost" in caplog.text


def test_what_fails_is_logged_and_the_island_serves(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(warm_up, "MOST_SECONDS", 0.0)
    with running_island(folder, {"gateway.warm_up": True}) as island:
        assert complete(island.address, [5, 6, 7], max_tokens=2, **GREEDY)
    assert "is not warm: it took too long" in caplog.text
