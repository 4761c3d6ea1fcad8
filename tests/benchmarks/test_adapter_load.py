"""The benchmark of additions beside streams runs, and adds what it says."""

import json
from typing import Any

import pytest

from tandem.cluster.client import AsyncClient
from tests.benchmarks import adapter_load

pytestmark = pytest.mark.long


def test_adapters_are_added_in_turn_beside_streams(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    added: list[str] = []
    add = AsyncClient.add_adapter

    def noted(self: AsyncClient, name: str, path: str, **options: Any) -> Any:
        added.append(path.rpartition("/")[2])
        return add(self, name, path, **options)

    monkeypatch.setattr(AsyncClient, "add_adapter", noted)
    adapter_load.main(["--adapters", "5", "--rate", "20", "--rank", "4"])
    found = json.loads(capsys.readouterr().out)
    assert added == ["0", "1", "2", "3", "0"]
    assert not found["errors"]
    assert all(one["gaps"] > 10 for one in found["windows"].values())
    assert len(found["targets"]) == 1
