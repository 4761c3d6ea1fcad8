"""Each drafter changes no output: when workers die and requests move, with cancelled requests, and when it errs or
breaks.

Its drafts are right most of the time. A cluster of processes for each drafter, and one island in this process.
"""

import itertools
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from tandem.cluster.client import Client
from tandem.cluster.client.client_messages import GenerateUpdate
from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.requests import rebalancer
from tandem.cluster.routing.policy import WorkerLoad
from tandem.cluster.routing.rebalance import Move
from tandem.cluster.supervision.launcher import Cluster
from tandem.proto import inference_pb2
from tandem.workers import worker
from tandem.workers.runner import drafts
from tandem.workers.speculation.drafter import DraftAsk
from tandem.workers.speculation.model_drafter import ModelDrafter
from tests.support.client_requests import complete, complete_all, tokens_of
from tests.support.http_client import COMPLETIONS, answer
from tests.support.island import Island, running_island
from tests.support.likely_drafters import make_head, make_llama, make_mtp, make_smaller
from tests.support.local_processes import LocalProcesses
from tests.support.oracle import random_prompt
from tests.support.steady_steps import STEADY
from tests.support.waiting import until

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
DRAWN: dict[str, Any] = {"temperature": 1.0, "seed": 11, "ignore_eos": True}
PROMPTS = [random_prompt(length, seed=length, vocab_size=512) for length in (3, 20, 45, 70)]
ATTEMPTS = 40  # on a busy machine answers may end before the first report of a worker
NUM_TOKENS = 70


@dataclass(frozen=True)
class Drafted:
    """A target with a drafter; plain serves it without one."""

    model: Path
    settings: dict[str, Any]
    plain: Island
    outputs: dict[str, list[list[int]]] = field(default_factory=dict)

    def due(self, sampling: dict[str, Any]) -> list[list[int]]:
        """Returns the outputs for PROMPTS without speculation."""
        name = repr(sampling)
        if name not in self.outputs:
            self.outputs[name] = complete_all(self.plain.address, PROMPTS, max_tokens=NUM_TOKENS, **sampling)
        return self.outputs[name]

    @contextmanager
    def island(self, **settings: Any) -> Iterator[Island]:
        with running_island(self.model, self.settings | settings) as island:
            yield island


Make = Callable[[Path], Path]
KINDS: dict[str, tuple[str, Make, Callable[[Path, Path], Path] | None]] = {
    "draft_model": ("draft_model", make_llama, make_smaller),
    "mtp": ("mtp", make_mtp, None),
    "eagle3": ("eagle3", make_llama, make_head),
    "states": ("mtp", partial(make_mtp, arch="qwen3_next"), None),
}
"""The method of speculation, and makers of the model and of its drafter's checkpoint."""


@pytest.fixture(scope="module", params=KINDS)
def drafted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drafted]:
    folder = tmp_path_factory.mktemp(request.param)
    method, make, make_draft = KINDS[request.param]
    model = make(folder / "model")
    settings: dict[str, Any] = {"speculation.method": method, "speculation.tokens": 4}
    if make_draft is not None:
        settings["speculation.draft"] = str(make_draft(folder / "draft", model))
    with running_island(model, {"gateway.http_port": 0}) as plain:
        yield Drafted(model, settings, plain)


@pytest.fixture(scope="module")
def served(drafted: Drafted) -> Iterator[str]:
    """Runs a cluster of two islands with the drafter, each of a prefill and a decode worker, and yields its address."""
    settings = {
        "model.path": str(drafted.model),
        "num_islands": 2,
        "island.threads_per_worker": 1,
        "gateway.processes": 1,
        "gateway.port": 0,
        "gateway.http_port": 0,
        "cache.num_pages": 128,
        "recovery.max_restarts": 100,
        "recovery.drain_seconds": 60.0,
    }
    cluster = Cluster(load_config(None, settings | drafted.settings), LocalProcesses(STEADY))
    yield cluster.start()
    cluster.stop()


def info(address: str) -> inference_pb2.ClusterInfo:
    with Client(address) as client:
        return client.cluster_info()


def workers(address: str) -> list[inference_pb2.WorkerInfo]:
    return [one for island in info(address).islands for one in island.workers]


def whole(address: str) -> bool:
    """Returns whether both islands serve, and all their pages are free."""
    there = workers(address)
    return len(there) == 4 and all(one.free_pages == one.num_pages for one in there)


def accepted(updates: Sequence[GenerateUpdate]) -> int:
    usage = updates[-1].usage
    assert usage is not None
    return usage.accepted_tokens


@pytest.mark.gate("draft_model-greedy", "mtp-seeded")
@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "seeded"])
def test_a_killed_decode_worker_costs_no_token(drafted: Drafted, served: str, sampling: dict[str, Any]) -> None:
    until(lambda: whole(served))
    # So many that a busy machine still decodes when it is asked.
    asked: dict[str, Any] = {"max_tokens": 3 * NUM_TOKENS, **sampling}
    expected = tokens_of(complete(drafted.plain.address, PROMPTS[2], **asked))
    updates: list[GenerateUpdate] = []
    with Client(served) as client:
        for update in client.generate(PROMPTS[2], timeout=100, **asked):
            updates.append(update)
            if len(updates) == 2:
                (busy,) = [island for island in info(served).islands if any(one.running for one in island.workers)]
                os.kill(busy.workers[1].pid, signal.SIGKILL)
    assert tokens_of(updates) == expected
    assert updates[-1].timings is not None
    assert updates[-1].timings.attempts == 2
    assert accepted(updates) > 0


@pytest.mark.gate("draft_model")
def test_cancels_beside_disturb_no_request(drafted: Drafted, served: str) -> None:
    until(lambda: whole(served))

    def cancel_behind(number: int) -> None:
        with Client(served) as client:
            stream = client.generate(PROMPTS[number % 4], timeout=60, max_tokens=300, **DRAWN)
            for _ in range(1 + number):
                next(stream)
            stream.close()

    with ThreadPoolExecutor(4) as pool:
        cancelled = [pool.submit(cancel_behind, number) for number in range(8)]
        assert complete_all(served, PROMPTS, max_tokens=NUM_TOKENS, **DRAWN) == drafted.due(DRAWN)
        for one in cancelled:
            one.result(60)
    until(lambda: whole(served))


FEATURES: list[dict[str, Any]] = [
    {**GREEDY, "logprobs": 2},
    {"temperature": 1.0, "seed": 2, "n": 3, "logprobs": 1, "top_p": 0.9},
    {"temperature": 0.7, "seed": 3, "top_k": 5, "ignore_eos": False},
    {"temperature": 1.0, "seed": 4, "guided_regex": "( [a-z]+){4,30}"},
    {**GREEDY, "frequency_penalty": 0.6},
]


@pytest.mark.gate("mtp-*-guided_regex", "eagle3-*-top_p", "draft_model-*-frequency_penalty")
@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: "-".join(feature))
def test_each_feature_is_as_without_speculation(drafted: Drafted, served: str, feature: dict[str, Any]) -> None:
    body = {"prompt": PROMPTS[1], "max_tokens": 40, "return_token_ids": True, **feature}
    given, due = (answer(one, COMPLETIONS, **body) for one in (info(served).http_address, drafted.plain.http))
    for choice, wanted in zip(given["choices"], due["choices"], strict=True):
        for name in ("token_ids", "text", "finish_reason"):
            assert choice[name] == wanted[name]
        if "logprobs" in feature:
            close = pytest.approx(wanted["logprobs"]["token_logprobs"], abs=1e-4)
            assert choice["logprobs"]["token_logprobs"] == close
    details = given["usage"].get("completion_tokens_details") or {}
    ruled = "guided_regex" in feature or "frequency_penalty" in feature
    assert (details.get("accepted_prediction_tokens", 0) == 0) == ruled


@pytest.mark.gate("draft_model-stop", "eagle3-stop_token_ids")
@pytest.mark.parametrize("kind", ["stop", "stop_token_ids"])
def test_a_stop_within_an_accepted_draft_ends_the_answer(drafted: Drafted, served: str, kind: str) -> None:
    """The stop may be anywhere: each token after the fifth, whose text is new, ends one answer."""
    body: dict[str, Any] = {"prompt": PROMPTS[1], "max_tokens": 60, "return_token_ids": True, **DRAWN}
    tokens = drafted.due(DRAWN)[1]
    http, saved = info(served).http_address, 0
    tokenizer = Tokenizer.from_file(str(drafted.model / "tokenizer.json"))
    for place in range(5, 60):
        if place >= 12 and (saved or kind == "stop"):
            break  # else a worker whose drafts of late were wrong has made none so far
        if tokens.index(tokens[place]) < place:
            continue
        stop = {"stop": [tokenizer.decode([tokens[place]])]} if kind == "stop" else {"stop_token_ids": [tokens[place]]}
        given, due = (answer(one, COMPLETIONS, **body, **stop) for one in (http, drafted.plain.http))
        for name in ("token_ids", "text", "finish_reason", "stop_reason"):
            assert given["choices"][0][name] == due["choices"][0][name]
        assert due["choices"][0]["finish_reason"] == "stop"
        details = given["usage"].get("completion_tokens_details") or {}
        saved += details.get("accepted_prediction_tokens", 0)
    assert (saved > 0) == (kind == "stop_token_ids"), "the gateway ends the others, and the worker's counts are lost"
    until(lambda: whole(served))


@pytest.mark.gate("mtp")
def test_requests_that_move_lose_no_token(drafted: Drafted, monkeypatch: pytest.MonkeyPatch) -> None:
    """They move back and forth between both workers, with the drafter's KV."""
    looks = itertools.count()

    def all_move(loads: Sequence[WorkerLoad], token_seconds: float) -> list[Move]:
        source, target = loads if next(looks) % 2 else loads[::-1]
        return [Move(source, target, len(PROMPTS))]

    monkeypatch.setattr(rebalancer, "moves", all_move)
    monkeypatch.setattr(rebalancer, "PERIOD_SECONDS", 0.01)
    settings = {"scheduler.roles": "adaptive", "scheduler.token_seconds": 0.02}
    with drafted.island(**settings) as island, ThreadPoolExecutor(len(PROMPTS)) as pool:

        def ask(prompt: Sequence[int]) -> list[GenerateUpdate]:
            return complete(island.address, prompt, max_tokens=NUM_TOKENS, **DRAWN)

        moves = held = 0
        for _ in range(ATTEMPTS):
            ran = list(pool.map(ask, PROMPTS))
            assert [tokens_of(updates) for updates in ran] == drafted.due(DRAWN)
            moves += sum(updates[-1].timings.moves for updates in ran if updates[-1].timings is not None)
            held += sum(map(accepted, ran))
            if moves >= 2 and held:
                return
    raise AssertionError(f"{moves} moves, {held} drafted tokens accepted")


class Steered(ModelDrafter):
    """Drafts as the model does, and hands on the target's next tokens, moved by `off`."""

    known: Sequence[Sequence[int]] = ()
    off = 0

    def propose(self, asks: Sequence[DraftAsk]) -> list[np.ndarray]:
        return [self._steered(ask, draft) for ask, draft in zip(asks, super().propose(asks), strict=True)]

    def _steered(self, ask: DraftAsk, draft: np.ndarray) -> np.ndarray:
        context = ask.context.tolist()
        (whole,) = [tokens for tokens in self.known if tokens[: len(context)] == context]
        due = np.array(whole[len(context) : len(context) + draft.size], np.int64)
        return (due + self.off) % 512


@pytest.mark.gate("draft_model-right", "mtp-wrong")
@pytest.mark.parametrize("off", [0, 1], ids=["right", "wrong"])
def test_a_drafter_that_is_always_right_or_wrong(drafted: Drafted, off: int, monkeypatch: pytest.MonkeyPatch) -> None:
    due = drafted.due(DRAWN)
    known = [[*prompt, *output] for prompt, output in zip(PROMPTS, due, strict=True)]
    steered = type("Steered", (Steered,), {"known": known, "off": off})
    monkeypatch.setattr(worker, "make_drafter", lambda settings, runner: steered(runner))
    with drafted.island() as island:
        assert complete_all(island.address, PROMPTS, max_tokens=NUM_TOKENS, **DRAWN) == due
        updates = complete(island.address, PROMPTS[1], max_tokens=NUM_TOKENS, **DRAWN)
        assert tokens_of(updates) == due[1]
    usage = updates[-1].usage
    assert usage is not None
    assert usage.drafted_tokens > 0
    assert usage.accepted_tokens == (0 if off else usage.drafted_tokens)


@pytest.mark.gate("mtp")
def test_a_drafter_that_breaks_within_a_draft_is_not_asked_again(
    drafted: Drafted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache pops what its steps had appended. Requests go on, and later ones come."""
    broken: list[int] = []

    def breaking(step: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, one: drafts.DraftStep, graphs: Any) -> Any:
            sampled = step(self, one, graphs)
            if one.number == 2:
                broken.append(one.number)
                raise RuntimeError("no draft")
            return sampled

        return run

    monkeypatch.setattr(drafts.Drafts, "_step", breaking(drafts.Drafts._step))
    with drafted.island() as island:
        assert complete_all(island.address, PROMPTS, max_tokens=NUM_TOKENS, **DRAWN) == drafted.due(DRAWN)
        assert complete_all(island.address, PROMPTS, max_tokens=NUM_TOKENS, **GREEDY) == drafted.due(GREEDY)
        assert broken == [2]
        until(lambda: all(one.free_pages == one.num_pages for one in workers(island.address)))
