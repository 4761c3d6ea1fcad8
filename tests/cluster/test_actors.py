"""A worker's answers to ping() while it is prepared: they tell a start that gets on from one that hangs."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.actors import WorkerActor
from tandem.cluster.config import load_config
from tandem.cluster.process_settings import worker_configs
from tandem.workers import worker as worker_module
from tandem.workers.config import WorkerConfig
from tandem.workers.model_runner import ModelRunner
from tandem.workers.random_checkpoint import make_checkpoint


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> WorkerConfig:
    folder = tmp_path_factory.mktemp("actors") / "model"
    make_checkpoint(folder, arch="llama", size="tiny", seed=0)
    return worker_configs(load_config(None, {"model.path": str(folder), "island.threads_per_worker": 1}), 64)[0]


def noting(answers: list[int | None], actor: WorkerActor, then: Callable[..., Any]) -> Callable[..., Any]:
    """`then`, before and after which another thread asks how far the actor has got."""

    def ask() -> None:
        asking = threading.Thread(target=lambda: answers.append(actor.ping()))
        asking.start()
        asking.join(30)

    def noted(*arguments: Any, **options: Any) -> Any:
        ask()
        result = then(*arguments, **options)
        ask()
        return result

    return noted


def test_a_start_tells_how_far_it_has_got(config: WorkerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    actor, answers = WorkerActor(config), list[int | None]()
    try:
        assert actor.ping() is None
        monkeypatch.setattr(worker_module, "load_decoder", noting(answers, actor, worker_module.load_decoder))
        actor.load()
        weights = sum(path.stat().st_size for path in Path(config.model_path).glob("*.safetensors"))
        before, after = answers
        assert before == 0
        assert after is not None
        assert weights / 2 < after <= weights
        assert actor.ping() is None
        actor.open(16)
        monkeypatch.setattr(ModelRunner, "warm_up", noting(answers, actor, lambda: None))
        monkeypatch.setattr(ModelRunner, "capture_steps", noting(answers, actor, lambda *_: None))
        with pytest.raises(Exception, match="handles"):
            actor.join([])
        assert actor.ping() is None
    finally:
        actor.stop()
