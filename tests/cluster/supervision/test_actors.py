"""A worker's answers to ping() while it is prepared: they tell a start that gets on from one that hangs."""

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.supervision import gateway_actor, worker_actor
from tandem.cluster.supervision.gateway_actor import GatewayActor
from tandem.cluster.supervision.process_settings import worker_configs
from tandem.cluster.supervision.worker_actor import WorkerActor
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tandem.transfer.errors import PeerGone
from tandem.workers import worker as worker_module
from tandem.workers.runner.model_runner import ModelRunner
from tests.support.gateways import settings_of

SECONDS = 60.0


def asking(answers: list[tuple[str, int] | None], actor: WorkerActor, then: Callable[..., Any]) -> Callable[..., Any]:
    """`then`, before and after which another thread asks how far the actor has got."""

    def ask() -> None:
        thread = threading.Thread(target=lambda: answers.append(actor.ping()))
        thread.start()
        thread.join(SECONDS)

    def asked(*arguments: Any, **options: Any) -> Any:
        ask()
        result = then(*arguments, **options)
        ask()
        return result

    return asked


def test_an_actor_whose_peer_is_lost_says_so_although_all_processes_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_actor, "LOST_SECONDS", 0.1)
    make_checkpoint(tmp_path / "model", arch="llama", size="tiny", seed=0)
    values = {"model.path": str(tmp_path / "model"), "island.threads_per_worker": 1, "island.transport": "tcp"}
    members = [WorkerActor(config) for config in worker_configs(load_config(None, values), 64)]
    try:
        handles = [actor.open(16) for actor in members]
        for actor in members:
            actor.join(handles)
        with ThreadPoolExecutor(2) as pool:
            ends = [pool.submit(actor.wait) for actor in members]
            peer = members[0]._worker._transport._peers[1]  # type: ignore[attr-defined]
            socket.socket.shutdown(peer._sockets[0], socket.SHUT_RDWR)
            for end in ends:
                with pytest.raises(PeerGone, match=r"PE \d: .*connection"):
                    end.result(SECONDS)
    finally:
        for actor in members:
            actor.stop()


def test_a_start_tells_how_far_it_has_got(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path / "model", arch="llama", size="tiny", seed=0)
    values = {"model.path": str(tmp_path / "model"), "island.threads_per_worker": 1}
    first, second = (WorkerActor(config) for config in worker_configs(load_config(None, values), 64))
    answers: list[tuple[str, int] | None] = []
    try:
        assert first.ping() is None
        monkeypatch.setattr(worker_module, "load_decoder", asking(answers, first, worker_module.load_decoder))
        first.load()
        monkeypatch.undo()
        second.load()
        handles = [first.open(16), second.open(16)]
        for actor in (first, second):
            actor.join(handles)
        monkeypatch.setattr(ModelRunner, "warm_up", asking(answers, first, ModelRunner.warm_up))
        monkeypatch.setattr(ModelRunner, "__init__", asking(answers, first, ModelRunner.__init__))
        assert first.ping() is None
        first.serve("127.0.0.1", None)
        assert first.ping() is None
    finally:
        first.stop()
        second.stop()
    phases, numbers = zip(*(answer for answer in answers if answer is not None), strict=True)
    assert phases == ("weights",) * 2 + ("kernels",) * 4
    before, loaded, cached, made, made_again, warm = numbers
    weights = sum(path.stat().st_size for path in (tmp_path / "model").glob("*.safetensors"))
    assert before == 0
    assert weights / 2 < loaded <= weights
    assert 0 <= cached <= made < made_again == warm  # kernels and graphs, counted from 0


def test_a_gateway_process_keeps_memory_for_the_next_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/cluster/processes/test_heap.py tests the effect of keeping, in a process of its own."""
    kept: list[bool] = []
    monkeypatch.setattr(gateway_actor, "keep_freed_memory", lambda: kept.append(True))
    make_checkpoint(tmp_path / "model", arch="llama", size="tiny", seed=0)
    actor = GatewayActor(settings_of(load_config(None, {"model.path": str(tmp_path / "model")}), 64, 16))
    actor._events.stop()
    assert kept == [True]
