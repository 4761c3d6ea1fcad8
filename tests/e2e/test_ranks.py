"""Workers of several ranks through the gRPC server: tokens equal transformers' in float32, for all shapes of both
sides."""

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.cluster.cli.output import print_cluster
from tandem.cluster.client import Client
from tandem.cluster.metrics.cluster_series import worker_families
from tandem.proto import inference_pb2
from tandem.transfer.rank_transport import RankTransport
from tests.support.checkpoints import CASES, make_model, save_checkpoint, sizes_for_ranks
from tests.support.client_requests import GREEDY, complete, complete_all, tokens_of
from tests.support.encoder_models import greedy_behind, save_t5gemma
from tests.support.island import Island, running_island
from tests.support.likely_drafters import make_head, make_llama, make_mtp, make_smaller
from tests.support.moves import move_back_and_forth
from tests.support.oracle import greedy_all, load_oracle, random_prompt
from tests.support.tvm_cache import TvmCache
from tests.support.waiting import until

CHUNK, OUTPUT = 48, 9
LENGTHS = (1, 8, 9, 47, 70, 149)
SHAPES = ((1, 2), (2, 1), (2, 2), (2, 4))
GATE = (
    "llama-1+2",
    "qwen3-2+1",
    "gemma3-2+2",
    "deepseek_v3-2+1",
    "deepseek_v3-1+2",
    "deepseek_v4-1+2",
    "gpt_oss-2+4",
    "qwen3_next-1+2",
)


def shape_of(prefill: int, decode: int) -> dict[str, Any]:
    ranks = {"island.prefill_ranks": prefill, "island.decode_ranks": decode}
    return {**ranks, "scheduler.max_batch_tokens": CHUNK}


def is_idle(island: Island) -> bool:
    """Returns whether nothing is held, on any rank."""
    return all(worker.on_step_thread(lambda one=worker: TvmCache.of(one.cache).is_empty) for worker in island.workers)


@pytest.mark.gate(*GATE)
@pytest.mark.parametrize(
    ("case", "prefill", "decode"),
    [(case, *shape) for case, shape in product(CASES, SHAPES) if max(shape) < 4 or not case.startswith("deepseek_v4")],
    ids=[f"{case}-{p}+{d}" for case, (p, d) in product(CASES, SHAPES) if max(p, d) < 4 or "deepseek_v4" not in case],
)
def test_tokens_of_every_family(case: str, prefill: int, decode: int, tmp_path: Path) -> None:
    """Prompts come alone, then all at once, which finds prefixes, together with requests that are cancelled."""
    make_model(case, **sizes_for_ranks(case, max(prefill, decode))).save_pretrained(tmp_path)
    prompts = [random_prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    due = greedy_all(load_oracle(tmp_path), prompts, OUTPUT)
    with running_island(tmp_path, shape_of(prefill, decode)) as island, island.client() as client:
        for prompt, tokens in zip(prompts[:3], due[:3], strict=True):
            assert tokens_of(complete(island.address, prompt, max_tokens=OUTPUT, **GREEDY)) == tokens
        for prompt in prompts[3:]:
            cancelled = client.generate(prompt, max_tokens=20, **GREEDY)
            next(cancelled)
            cancelled.close()
        assert complete_all(island.address, prompts * 2, max_tokens=OUTPUT, **GREEDY) == due * 2
        until(lambda: is_idle(island))
        (found,) = client.cluster_info().islands
        assert not any(worker.counters.corrupt for worker in found.workers)
    assert len(island.workers) == prefill + decode


@pytest.mark.gate("1+2")
@pytest.mark.parametrize(("prefill", "decode"), SHAPES[:3], ids=["1+2", "2+1", "2+2"])
def test_requests_that_move_between_unlike_workers(
    prefill: int, decode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some prompts are computed by their decode worker."""
    move_back_and_forth(2, monkeypatch)
    folder = save_checkpoint("gemma3", tmp_path)
    prompts = [random_prompt(5 + 9 * number, seed=number) for number in range(8)]
    due = greedy_all(load_oracle(folder), prompts, 40)
    settings = {"scheduler.roles": "adaptive", "scheduler.token_seconds": 0.02}
    with running_island(folder, shape_of(prefill, decode) | settings) as island:
        assert complete_all(island.address, prompts, max_tokens=40, **GREEDY) == due
        until(lambda: is_idle(island))


@pytest.mark.gate("ngram", "mtp")
@pytest.mark.parametrize("method", ["ngram", "draft_model", "mtp", "eagle3", "mtp of states"])
def test_drafts(method: str, tmp_path: Path) -> None:
    arch = "qwen3_next" if method.endswith("states") else "glm4_moe"
    method = method.removesuffix(" of states")
    model = make_mtp(tmp_path / "model", arch) if method == "mtp" else make_llama(tmp_path / "model")
    settings: dict[str, Any] = {"speculation.method": method, "speculation.tokens": 3, "island.num_decode": 1}
    if method in ("draft_model", "eagle3"):
        make = make_smaller if method == "draft_model" else make_head
        settings["speculation.draft"] = str(make(tmp_path / "draft", model))
    prompts = [random_prompt(length, seed=length, vocab_size=512) for length in (3, 20, 45, 70)]
    with running_island(model) as plain:
        due = complete_all(plain.address, prompts, max_tokens=40, **GREEDY)
    with running_island(model, shape_of(2, 2) | settings) as island:
        assert complete_all(island.address, prompts, max_tokens=40, **GREEDY) == due
        usage = complete(island.address, prompts[1], max_tokens=40, **GREEDY)[-1].usage
        assert usage is not None
        assert usage.accepted_tokens > 0
        until(lambda: is_idle(island))


def test_rules_on_logits_and_what_they_tell(tmp_path: Path) -> None:
    """Penalties and bans change gathered logits. Log-probabilities are those of a worker with one rank."""
    folder = save_checkpoint("qwen3", tmp_path)
    prompt = random_prompt(30, seed=4)
    asked = {"max_tokens": 20, "temperature": 0, "presence_penalty": 0.9, "frequency_penalty": 0.4, "ignore_eos": True}
    with running_island(folder, shape_of(1, 2)) as island, running_island(folder) as plain:
        ruled = [tokens_of(complete(one.address, prompt, **asked)) for one in (island, plain)]
        assert ruled[0] == ruled[1] != greedy_all(load_oracle(folder), [prompt], 20)[0]
        drawn = {"max_tokens": 20, "temperature": 1.1, "top_p": 0.9, "top_k": 20, "seed": 7, "logprobs": 3, "n": 2}
        told = [complete(one.address, prompt, **drawn) for one in (island, plain)]
        for index in range(2):
            found, due = ([update for update in updates if update.index == index] for updates in told)
            assert tokens_of(found) == tokens_of(due)
            chances = [[one.logprob for update in updates for one in update.logprobs] for updates in (found, due)]
            assert chances[0] == pytest.approx(chances[1], abs=1e-4)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_pushes_wrongly_is_noticed(rank: int, small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, wrong = RankTransport.write_slots, [True]

    def write_one_elsewhere(self: RankTransport, pe: int, group: int, source: Any, target: Any, *rest: Any) -> None:
        if self.rank == rank and wrong and wrong.pop():
            source = np.roll(source, 1)
        write(self, pe, group, source, target, *rest)

    prompt = random_prompt(40, 3, 512)
    with running_island(small_model, shape_of(2, 2)) as island, island.client() as client:
        due = tokens_of(complete(island.address, random_prompt(30, 4, 512), max_tokens=OUTPUT, **GREEDY))
        assert len(due) == OUTPUT
        monkeypatch.setattr(RankTransport, "write_slots", write_one_elsewhere)
        complete(island.address, prompt, max_tokens=OUTPUT, **GREEDY)  # it is placed again
        (found,) = client.cluster_info().islands
        assert [worker.counters.corrupt for worker in found.workers] == [0, 1]


def test_a_rank_that_stalls_is_named(small_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt, resume = random_prompt(30, 3, 512), threading.Event()
    with (
        running_island(small_model, shape_of(1, 2)) as island,
        island.client() as client,
        ThreadPoolExecutor(1) as pool,
    ):
        due = tokens_of(complete(island.address, prompt, max_tokens=OUTPUT, **GREEDY))
        follower = island.workers[2]._step_thread
        assert follower is not None
        follower.call(resume.wait)
        try:
            asked = pool.submit(complete, island.address, prompt, max_tokens=OUTPUT, **GREEDY)
            until(lambda: any(one.stalled for one in ranks_of(client)))
            info = client.cluster_info()
        finally:
            resume.set()
        assert tokens_of(asked.result()) == due
        print_cluster(info, as_json=False)
        assert "rank 1 stalled" in capsys.readouterr().out
        assert rank_series(info) == {"0": 1, "1": 0}
        assert [one.alive and not one.stalled for one in ranks_of(client)] == [True, True]
        assert all(one.resident_bytes > 1 << 20 for one in ranks_of(client))
        assert rank_series(client.cluster_info()) == {"0": 1, "1": 1}


def ranks_of(client: Client) -> list[inference_pb2.RankInfo]:
    """Returns the ranks of the decode worker."""
    (island,) = client.cluster_info().islands
    return list(island.workers[1].ranks)


def rank_series(info: inference_pb2.ClusterInfo) -> dict[str, float]:
    found = next(one for one in worker_families(info.islands) if one.name == "tandem:rank_up")
    return {one.labels["rank"]: one.value for one in found.samples}


def test_an_encoders_entries(tmp_path: Path) -> None:
    model = save_t5gemma(tmp_path)
    prompts = [random_prompt(length, seed=length) for length in (1, 8, 25, 47)]
    with running_island(tmp_path, shape_of(1, 2)) as island:
        due = [greedy_behind(model, prompt, 16) for prompt in prompts]
        assert complete_all(island.address, prompts, max_tokens=16, **GREEDY) == due
        until(lambda: is_idle(island))
