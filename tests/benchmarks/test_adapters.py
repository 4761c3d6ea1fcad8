"""The benchmark of adapters runs on a CPU, and its rows have the adapters that it says."""

import json
from typing import Any

import pytest

from tandem.workers.kernels.torch.adapters import TorchAdapters
from tests.benchmarks import adapters

ROWS, STEPS = 8, 10


def test_its_rows_have_adapters(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    add = TorchAdapters.add

    def noted(self: TorchAdapters, y: Any, x: Any, matrices: Any, slots: Any) -> None:
        seen.append(slots.tolist())
        add(self, y, x, matrices, slots)

    monkeypatch.setattr(TorchAdapters, "add", noted)
    for name, value in {"STEPS": STEPS, "SEGMENT": STEPS // 2, "WARM_STEPS": 1, "ROUNDS": 1}.items():
        monkeypatch.setattr(adapters, name, value)
    adapters.main(["--shape", "tiny", "--device", "cpu", "--rows", str(ROWS), "--context", "32"])
    found = json.loads(capsys.readouterr().out)
    assert set(found["step_ms"]) == {"base", "without", "with", "alone"}
    assert len(found["targets"]) == 2
    products = 2 * 4 * (STEPS + 1)  # two layers of four products, in each step
    assert [len(set(slots)) for slots in seen] == [ROWS] * products + [1] * products
