"""The benchmark of additions beside streams runs, and adds what it says."""

import json
from typing import Any

import pytest

from tandem.cluster.client import Client
from tests.benchmarks import adapter_load

pytestmark = pytest.mark.long


def test_each_round_adds_one_beside_streams(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    added: list[str] = []
    add = Client.add_adapter

    def noted(self: Client, name: str, path: str, **options: Any) -> Any:
        added.append(path.rpartition("/")[2])
        return add(self, name, path, **options)

    monkeypatch.setattr(Client, "add_adapter", noted)
    monkeypatch.setattr(adapter_load, "WINDOW_SECONDS", 0.5)
    adapter_load.main(["--rounds", "2", "--streams", "2", "--size", "tiny", "--rank", "4"])
    found = json.loads(capsys.readouterr().out)
    assert added == ["0", "1"]
    assert all(one["gaps"] > 10 for one in found["windows"].values())
    assert len(found["targets"]) == 1
