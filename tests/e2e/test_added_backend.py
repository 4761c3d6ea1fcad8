"""An attention backend and a transport that are added to their tables serve an island, and change no token."""

from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from torch import Tensor

from tandem.cache.kernels import choice
from tandem.cache.kernels.torch.kernels import TorchKernels
from tandem.cluster.config import island
from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.errors import ConfigError
from tandem.transfer import factory
from tandem.transfer.shared_memory import SharedMemoryTransport
from tests.cache.operations.test_programs import run_programs
from tests.support.checkpoints import save_checkpoint
from tests.support.client_requests import GREEDY, complete_all
from tests.support.island import running_island
from tests.support.oracle import greedy_all, load_oracle, random_prompt

OUTPUT = 9
CALLS: list[str] = []


class AddedKernels(TorchKernels):
    def attend(self, *args: Any, **options: Any) -> Tensor:
        CALLS.append("attend")
        return super().attend(*args, **options)


class AddedTransport(SharedMemoryTransport):
    def post(self, pe: int, row: int, signal: int, payload: int | Tensor) -> None:
        CALLS.append("post")
        super().post(pe, row, signal, payload)


@pytest.fixture(autouse=True)
def _added(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    backends = {"added": AddedKernels, **choice.KV_BACKENDS}
    monkeypatch.setattr(choice, "KV_BACKENDS", MappingProxyType(backends))
    added = factory.Registration(__name__, "AddedTransport", ("cpu",))
    for module in (factory, island):
        monkeypatch.setattr(module, "TRANSPORTS", MappingProxyType({**factory.TRANSPORTS, "added": added}))
    CALLS.clear()
    yield
    CALLS.clear()


def test_an_island_computes_and_pushes_with_them(tmp_path: Path) -> None:
    folder = save_checkpoint("llama", tmp_path)
    prompts = [random_prompt(length, length) for length in (1, 20, 70)]
    with running_island(folder, {"island.transport": "added"}) as island:
        tokens = complete_all(island.address, prompts, max_tokens=OUTPUT, **GREEDY)
    assert tokens == greedy_all(load_oracle(folder), prompts, OUTPUT)
    assert {*CALLS} == {"attend", "post"}


def test_random_programs_compare_the_backend() -> None:
    """tests/cache/settings.py leaves the choice to the table."""
    assert run_programs("two groups", 1).keys() >= {"forwards", "sends", "steps", "landings"}
    assert {*CALLS} == {"attend"}


def test_the_configuration_lists_the_transport() -> None:
    with pytest.raises(ConfigError, match="shared_memory or tcp or nixl or nvshmem or added"):
        load_config(None, {"island.transport": "pigeon"})
