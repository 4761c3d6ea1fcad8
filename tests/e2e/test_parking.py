"""Requests that give their room up to others and go on, in a cluster: tokens against transformers'."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from threading import Event
from typing import Any

import pytest

from tandem.cache.store import parked_store
from tandem.cluster.cli.replayed_workers import replay_files
from tandem.cluster.client import Client
from tandem.cluster.metrics.cluster_series import worker_families
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tandem.proto import inference_pb2
from tandem.workers.decode import yielded_rows
from tandem.workers.runner.model_runner import ModelRunner
from tests.cache.late_lanes import LateLanes
from tests.e2e.test_ranks import is_idle
from tests.e2e.test_state_snapshots import workers_of
from tests.support.checkpoints import save_checkpoint
from tests.support.client_requests import GREEDY, complete, tokens_of
from tests.support.encoder_models import greedy_behind, save_t5gemma
from tests.support.island import Island, running_island
from tests.support.moves import move_back_and_forth
from tests.support.oracle import greedy, greedy_all, load_oracle, random_prompt
from tests.support.waiting import until

FEW: dict[str, Any] = {"cache.num_pages": 20, "cache.parked_bytes": 8 << 20, "gateway.priorities": [-5, 10]}
"""Settings with pages of 8 positions, for two long requests at a time."""
LONG, OUTPUT = random_prompt(20, 1), 100
SHORT = [random_prompt(40 + number, number) for number in range(2, 6)]
NUM_SHORT = 24


def decode_worker(island: Island) -> inference_pb2.WorkerInfo:
    return next(one for one in workers_of(island) if one.role == inference_pb2.ROLE_DECODE)


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Running requests are still there when a busy machine sends others, or looks."""
    step = ModelRunner.step

    def slow(self: ModelRunner, *given: Any, **options: Any) -> Any:
        time.sleep(0.02)
        return step(self, *given, **options)

    monkeypatch.setattr(ModelRunner, "step", slow)


@pytest.mark.usefixtures("slow_steps")
def test_streams_pause_and_go_on(tmp_path: Path) -> None:
    folder = save_checkpoint("llama", tmp_path)
    oracle = load_oracle(folder)
    expected, due = greedy(oracle, LONG, OUTPUT), greedy_all(oracle, SHORT, NUM_SHORT)
    with running_island(folder, FEW) as island, island.client() as client:
        streams = [client.generate(LONG, max_tokens=OUTPUT, priority=10, **GREEDY) for _ in range(2)]
        begun = [[*next(stream).token_ids] for stream in streams]
        for prompt, tokens in zip(SHORT, due, strict=True):
            assert tokens_of(complete(island.address, prompt, max_tokens=NUM_SHORT, **GREEDY)) == tokens
        assert decode_worker(island).counters.parks
        for first, stream in zip(begun, streams, strict=True):
            assert first + tokens_of(list(stream)) == expected
        until(lambda: is_idle(island))
        worker = decode_worker(island)
        assert worker.counters.resumes == worker.counters.parks
        assert (worker.parked, worker.parked_bytes_used) == (0, 0)
        assert 0 < worker.parked_bytes <= 8 << 20
        samples = {one.name: one.samples for one in worker_families(client.cluster_info().islands)}
        assert max(one.value for one in samples["tandem:worker_parks"]) == worker.counters.parks
        assert max(one.value for one in samples["tandem:worker_parked_bytes"]) == worker.parked_bytes


@pytest.mark.usefixtures("slow_steps")
def test_a_parked_request_is_cancelled(tmp_path: Path) -> None:
    folder = save_checkpoint("llama", tmp_path)
    with running_island(folder, FEW) as island, island.client() as client:
        low = client.generate(LONG, max_tokens=OUTPUT, priority=10, **GREEDY)
        next(low)
        high = client.generate(LONG, max_tokens=OUTPUT, priority=1, **GREEDY)
        other = client.generate(random_prompt(30, 9), max_tokens=OUTPUT, **GREEDY)
        for stream in (other, high):
            next(stream)
        until(lambda: decode_worker(island).parked == 1)
        low.close()
        until(lambda: decode_worker(island).parked == 0)
        high.close()
        other.close()
        until(lambda: is_idle(island))
        assert decode_worker(island).parked_bytes_used == 0


def test_rows_pause_while_an_urgent_prompt_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So no forward has both a row of the last priority and a chunk of the prompt."""
    monkeypatch.setattr(yielded_rows, "MOST_SECONDS", 100.0)  # this machine may be slow
    folder, urgent = save_checkpoint("llama", tmp_path / "model"), random_prompt(200, 2)
    oracle, output, chunk = load_oracle(folder), 200, 16
    settings = {"scheduler.max_batch_tokens": chunk, "gateway.priorities": [0, 10], **COLOCATED}
    settings |= {"record.folder": str(tmp_path / "records"), "record.prompts": True}
    with running_island(folder, settings) as island, island.client() as client:
        low = client.generate(LONG, max_tokens=output, priority=10, **GREEDY)
        begun = [*next(low).token_ids]
        assert tokens_of(complete(island.address, urgent, max_tokens=1, **GREEDY)) == greedy(oracle, urgent, 1)
        assert begun + tokens_of(list(low)) == greedy(oracle, LONG, output)
    forwards = replay_files(sorted((tmp_path / "records").glob("*.tandemrec"))).by_name["launch"]
    chunks = sum(-(-len(prompt) // chunk) for prompt in (LONG, urgent))
    assert forwards == chunks + output - 1


def mixed(island: Island, asked: Sequence[tuple[list[int], int, int]], options: dict[str, Any]) -> list[list[int]]:
    """Returns the tokens of prompts with these lengths and priorities, sent by many clients at once."""

    def one(of: tuple[list[int], int, int]) -> list[int]:
        prompt, most, priority = of
        with Client(island.address) as client:
            updates = client.generate(prompt, max_tokens=most, priority=priority, timeout=240, **GREEDY, **options)
            return tokens_of(list(updates))

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(one, asked))


@contextmanager
def one_parked(island: Island, count: int, expected: list[int], first: list[int]) -> Iterator[None]:
    """`count` streams of the last priority reserve 22 of the 24 pages of each worker that decodes, so `first` parks
    one. Checks the tokens of the streams at the end."""
    with island.client() as client:
        streams = [client.generate(LONG, max_tokens=len(expected), priority=10, **GREEDY) for _ in range(count)]
        begun = [[*next(stream).token_ids] for stream in streams]
        complete(island.address, first, max_tokens=24, priority=-5, **GREEDY)
        yield
        for first, stream in zip(begun, streams, strict=True):
            assert first + tokens_of(list(stream)) == expected


CASES = ["llama", "gemma3", "deepseek_v4", "gpt_oss", "qwen3_next", "llama4", "nemotron_h"]
ADAPTIVE: dict[str, Any] = {"scheduler.roles": "adaptive"}
COLOCATED: dict[str, Any] = {"scheduler.roles": "colocated", "island.num_prefill": 0}
OVERCOMMIT: dict[str, Any] = {"scheduler.reserved_output": 0.1, "cache.parked_bytes": 64 << 20}
SHAPES: dict[str, dict[str, Any]] = {
    "split": {},
    "adaptive": ADAPTIVE,
    "colocated": COLOCATED,
    "2 ranks": {"island.decode_ranks": 2},
    "ngram": {"speculation.method": "ngram"},
    "host tier": {"cache.host_bytes": 4 << 20},
    "overcommit": OVERCOMMIT,
    "overcommit, adaptive": {**OVERCOMMIT, **ADAPTIVE},
    "overcommit, colocated": {**OVERCOMMIT, **COLOCATED},
    "late copies": {},
}
GATE = ("llama-2 ranks",)


@pytest.mark.gate(*GATE)
@pytest.mark.parametrize(
    ("case", "shape"),
    [(case, shape) for case in CASES for shape in SHAPES if (case, shape) != ("nemotron_h", "ngram")],
    ids=[f"{case}-{shape}" for case in CASES for shape in SHAPES if (case, shape) != ("nemotron_h", "ngram")],
)
def test_storms(case: str, shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of four priorities have pages for a few, most of which are taken; then the records are replayed."""
    moving = Event()
    if "adaptive" in shape:
        move_back_and_forth(2, monkeypatch, moving.is_set)
    if shape == "late copies":
        late = partial(LateLanes, random=Random(3), most_looks=12)
        monkeypatch.setattr(parked_store, "lanes_of", late)
    folder = save_checkpoint(case, tmp_path / "model")
    random, most, oracle = Random(3), 24, load_oracle(folder)
    prompts = [random_prompt(random.randint(4, 60), number) for number in range(24)]
    expected, long = greedy_all(oracle, prompts, most), greedy(oracle, LONG, 150)
    asked = [(prompt, random.randint(2, most), random.choice([-5, 0, 4, 10])) for prompt in prompts]
    settings = {**FEW, "cache.num_pages": 24, "cache.state_interval": 16, "scheduler.max_sequences": 4}
    settings |= {"record.folder": str(tmp_path / "records"), "record.prompts": True, **SHAPES[shape]}
    with running_island(folder, settings) as island:
        with one_parked(island, 2 if "adaptive" in shape else 1, long, prompts[-1]):
            moving.set()  # before, a move would make room as well as parking does
            for tokens, (_, length, _), due in zip(mixed(island, asked, {}), asked, expected, strict=True):
                assert tokens == due[:length]
        until(lambda: is_idle(island))
        workers = workers_of(island)
    assert sum(one.counters.parks for one in workers)
    assert not sum(one.parked for one in workers)
    summary = replay_files(sorted((tmp_path / "records").glob("*.tandemrec")))
    assert summary.difference is None
    assert summary.by_name["park"] == sum(one.counters.parks for one in workers)


@pytest.mark.long
def test_prompts_with_an_encoder_are_parked(tmp_path: Path) -> None:
    oracle = save_t5gemma(tmp_path)
    pairs = [(random_prompt(40, number), random_prompt(20, 10 + number)) for number in range(6)]
    with running_island(tmp_path, FEW) as island, island.client() as client, ThreadPoolExecutor(5) as pool:

        def options(number: int) -> dict[str, Any]:
            return {"decoder_prompt": pairs[number][1], "priority": 10 - 2 * number, **GREEDY}

        def one(number: int) -> list[int]:
            return tokens_of(complete(island.address, pairs[number][0], max_tokens=30, **options(number)))

        running = client.generate(pairs[0][0], max_tokens=90, **options(0))
        begun = [*next(running).token_ids]
        for number, tokens in enumerate(pool.map(one, range(1, 6)), start=1):
            assert tokens == greedy_behind(oracle, pairs[number][0], 30, pairs[number][1])
        assert decode_worker(island).counters.parks
        assert begun + tokens_of(list(running)) == greedy_behind(oracle, pairs[0][0], 90, pairs[0][1])
        until(lambda: is_idle(island))


OPTIONS: dict[str, dict[str, Any]] = {
    "guide": {"guided": {"regex": "(ab|c){40,}"}},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "min_tokens": 60, "stop_token_ids": [7]},
    "answers": {"n": 2, "seed": 5, "temperature": 0.9, "ignore_eos": True},
    "log-probabilities": {"logprobs": 3, "seed": 5, "ignore_eos": True},
}


@pytest.mark.long
def test_a_parked_request_has_the_answer_of_one_that_was_not(tmp_path: Path) -> None:
    """Parking keeps all that its row has beside its pages."""
    make_checkpoint(tmp_path / "model", arch="qwen3", size="tiny", seed=1)
    with running_island(tmp_path / "model", {**FEW, "cache.num_pages": 24}) as island:
        for options in OPTIONS.values():
            asked: dict[str, Any] = {"max_tokens": 140, "temperature": 0, **options, "priority": 10}
            undisturbed = complete(island.address, LONG, **asked)
            until(lambda: is_idle(island))
            before = decode_worker(island).counters.parks
            with ThreadPoolExecutor(1) as pool:
                disturbed = pool.submit(complete, island.address, LONG, **asked)
                until(lambda: decode_worker(island).running > 0)
                complete(island.address, random_prompt(100, 3), max_tokens=60, **GREEDY)
                found = disturbed.result(60)
            assert decode_worker(island).counters.parks > before
            for index in range(asked.get("n", 1)):
                one, other = ([part for part in of if part.index == index] for of in (found, undisturbed))
                assert tokens_of(one) == tokens_of(other)
                chosen = [[entry.logprob for part in of for entry in part.logprobs] for of in (one, other)]
                assert chosen[0] == pytest.approx(chosen[1], abs=1e-5)
