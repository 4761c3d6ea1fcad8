"""LoRA adapters of a cluster of processes that are killed: names, weights and tokens outlast them."""

import json
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.cluster.cli.commands import main
from tandem.cluster.client import Client
from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.errors import AdapterRefused, ConfigError, StartFailed, TandemError, UnknownModel
from tandem.cluster.supervision.launcher import Cluster
from tandem.proto import inference_pb2
from tests.e2e.test_recovery import OVERRIDES, info
from tests.support.adapters import merged, save_adapter
from tests.support.client_requests import GREEDY, complete, tokens_of
from tests.support.local_processes import LocalProcesses
from tests.support.oracle import greedy, load_oracle, random_prompt
from tests.support.steady_steps import STEADY
from tests.support.waiting import until

pytestmark = pytest.mark.long
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROMPT, LONG = random_prompt(50, 1, 512), 300
SETTINGS: dict[str, Any] = OVERRIDES | {"num_islands": 1, "gateway.processes": 2, "adapters.max_resident": 2}


@dataclass(frozen=True)
class Served:
    address: str
    root: Path
    oracle: Any

    def greedy(self, name: str, tokens: int) -> list[int]:
        with merged(self.oracle, self.root / name) as model:
            return greedy(model, PROMPT, tokens)

    @property
    def workers(self) -> list[inference_pb2.WorkerInfo]:
        return [worker for island in info(self.address).islands for worker in island.workers if worker.alive]

    def held(self) -> list[set[str]]:
        """Returns the names of each worker's adapters."""
        return [{one.name for one in worker.adapters} for worker in self.workers]


@pytest.fixture(scope="module")
def served(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root, oracle = tmp_path_factory.mktemp("adapters"), load_oracle(small_model)
    for seed, name in enumerate(("first", "second", "other"), 1):
        save_adapter(oracle, root / name, LINEAR, rank=4, seed=seed)
    settings = SETTINGS | {"adapters.folders": {"first": str(root / "first")}, "adapters.allowed_root": str(root)}
    cluster = Cluster(load_config(None, {"model.path": str(small_model), **settings}), LocalProcesses(STEADY))
    yield Served(cluster.start(), root, oracle)
    cluster.stop()


def whole(served: Served) -> bool:
    workers = served.workers
    free = len(workers) == 2 and all(one.free_pages == one.num_pages for one in workers)
    return free and all(gateway.pid for gateway in info(served.address).gateways)


def listed(served: Served) -> list[list[str]]:
    """Returns the adapters' names over several connections, which the kernel gives to both processes."""
    names = []
    for _ in range(12):
        with Client(served.address) as client:
            names.append([one.name for one in client.adapters().adapters])
    return names


def test_commands_change_what_all_processes_serve(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    def tandem(*words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main([*words, "--address", served.address])
        said = capsys.readouterr()
        assert not ended.value.code, said.err
        return said.out

    assert "first  rank 4" in tandem("adapter", "list")
    tandem("adapter", "add", "second", str(served.root / "second"))
    assert listed(served) == [["first", "second"]] * 12
    assert re.search(r"adapters .* [012] of 2 resident", tandem("status"))
    assert re.search(r"LoRA", tandem("top", "--once"))
    (first, second) = json.loads(tandem("adapter", "list", "--json"))
    assert (second["name"], second["workers"], second["holding"]) == ("second", 2, 2)
    said = tandem("generate", "--token-ids", ",".join(map(str, PROMPT)), "--adapter", "second", "--json",
                  "--temperature", "0", "--ignore-eos", "--max-tokens", "6")  # fmt: skip
    assert str(served.greedy("second", 6))[1:-1].replace(" ", "") in said.replace(" ", "").replace("\n", "")
    assert tandem("adapter", "remove", "second") == "removed second\n"
    assert listed(served) == [["first"]] * 12
    assert first["digest"]
    until(lambda: served.held() == [{"first"}] * 2)


@pytest.mark.parametrize("pe", [0, 1])
def test_a_stream_goes_on_after_a_kill_and_new_workers_hold_all(served: Served, pe: int) -> None:
    until(lambda: whole(served))
    with Client(served.address) as client:
        client.add_adapter("second", str(served.root / "second"))
        stream = client.generate(PROMPT, max_tokens=LONG, model="second", timeout=100, **GREEDY)
        tokens = [*next(stream).token_ids]
        (worker,) = [one for one in served.workers if one.pe == pe]
        os.kill(worker.pid, signal.SIGKILL)
        tokens += tokens_of(list(stream))
        assert tokens == served.greedy("second", LONG)
        until(lambda: served.held() == [{"first", "second"}] * 2)
        client.remove_adapter("second")


def test_a_gateway_that_starts_again_knows_the_names_and_its_client_goes_on(served: Served) -> None:
    until(lambda: whole(served))
    with Client(served.address) as client:
        client.add_adapter("second", str(served.root / "second"))
        stream = client.generate(PROMPT, max_tokens=LONG, model="second", timeout=100, **GREEDY)
        tokens = [*next(stream).token_ids]
        for gateway in info(served.address).gateways:
            os.kill(gateway.pid, signal.SIGKILL)
        tokens += tokens_of(list(stream))
        assert tokens == served.greedy("second", LONG)
        until(lambda: whole(served))
        assert listed(served) == [["first", "second"]] * 12
        client.remove_adapter("second")


def test_what_is_left_of_a_removed_or_changed_adapter_is_not_replayed(served: Served) -> None:
    until(lambda: whole(served))
    with Client(served.address) as client:
        client.add_adapter("second", str(served.root / "second"))
        stream = client.generate(PROMPT, max_tokens=LONG, model="second", timeout=100, **GREEDY)
        next(stream)
        client.add_adapter("second", str(served.root / "other"), load_inplace=True)
        (decode,) = [one for one in served.workers if one.pe == 1]
        os.kill(decode.pid, signal.SIGKILL)
        with pytest.raises(AdapterRefused, match="was removed, or its name was loaded with other weights"):
            list(stream)
        until(lambda: whole(served))
        updates = complete(served.address, PROMPT, max_tokens=6, model="second", **GREEDY)
        assert tokens_of(updates) == served.greedy("other", 6)
        client.remove_adapter("second")
        with pytest.raises(UnknownModel):
            complete(served.address, PROMPT, max_tokens=1, model="second", **GREEDY)


def test_workers_that_join_hold_all_before_they_serve(served: Served) -> None:
    until(lambda: whole(served))
    with Client(served.address) as client:
        client.add_adapter("second", str(served.root / "second"))
        for decode in (2, 1):
            client.scale(num_decode=decode)
            for _ in range(4):
                updates = complete(served.address, PROMPT, max_tokens=6, model="second", **GREEDY)
                assert tokens_of(updates) == served.greedy("second", 6)
            until(lambda decode=decode: served.held() == [{"first", "second"}] * (1 + decode))
        client.remove_adapter("second")


def test_a_start_with_a_folder_that_no_worker_can_serve_fails(small_model: Path, tmp_path: Path) -> None:
    oracle = load_oracle(small_model)
    for name, rank, words in (("wide", 32, "adapters.max_rank"), ("other", 4, "q_proj.lora_B.weight has shape")):
        folder = save_adapter(oracle, tmp_path / name, LINEAR, rank=rank)
        if name == "other":
            tensor = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
            path = folder / "adapter_model.safetensors"
            save_file(load_file(path) | {tensor: torch.zeros(3, rank)}, path)
        settings = SETTINGS | {"adapters.folders": {name: str(folder)}, "model.path": str(small_model)}
        cluster = Cluster(load_config(None, settings), LocalProcesses())
        try:
            with pytest.raises((ConfigError, StartFailed), match=words) as refused:
                cluster.start()
            assert isinstance(refused.value, TandemError)
            assert "adapters.folders" in str(refused.value)
        finally:
            cluster.stop()
