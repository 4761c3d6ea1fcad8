"""Checks which CUDA graphs a worker captures before it serves."""

from dataclasses import replace
from pathlib import Path

import pytest

from tandem.cluster.supervision.process_settings import worker_configs
from tandem.workers.runner.model_runner import ModelRunner
from tests.support import island
from tests.workers.service.test_service import running_pair


@pytest.mark.parametrize("adaptive", [False, True])
def test_graphs_are_captured_for_what_a_worker_is_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, adaptive: bool
) -> None:
    captured: list[str] = []
    for name in ("capture_steps", "capture_prompts"):
        monkeypatch.setattr(ModelRunner, name, lambda self, most, name=name: captured.append(f"{name} {most}"))
    configs = lambda *arguments: [replace(one, adaptive=adaptive) for one in worker_configs(*arguments)]  # noqa: E731
    monkeypatch.setattr(island, "worker_configs", configs)
    with running_pair(folder, {"scheduler.max_sequences": 12}):
        prompts, steps = "capture_prompts 64", "capture_steps 12"
        assert captured == ([steps, prompts, steps, prompts] if adaptive else [prompts, steps])
