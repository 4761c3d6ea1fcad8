"""Tests what a cluster finds out before it starts anything."""

import itertools
import json
import shutil
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.errors import ConfigError, ProcessEnded, StartFailed
from tandem.cluster.processes.placement import Where
from tandem.cluster.supervision import process_settings
from tandem.cluster.supervision.launcher import Cluster
from tandem.cluster.supervision.network import wait_for_hosts
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tandem.workers.config import WorkerConfig
from tandem.workers.models.registry import load_config as load_model_config
from tandem.workers.runner.model_cache import kv_layout
from tests.cluster.fake_processes import FakeProcess, FakeProcesses, room_of_each
from tests.support.checkpoints import make_model
from tests.support.draft_heads import save_eagle3, save_mtp
from tests.support.waiting import until


class CrampedProcesses(FakeProcesses):
    def check_room(self, processes: int, *, gpus: int) -> None:
        raise StartFailed(f"{processes} processes with {gpus} GPUs each are too many")


def test_islands_that_have_no_room_together(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    values = {"model.path": str(tmp_path / "model"), "num_islands": 2, "island.num_decode": 2, "gateway.port": 0}
    processes = CrampedProcesses()
    with pytest.raises(StartFailed, match=r"^num_islands is 2, .*num_decode 2: 6 processes with 0 GPUs each"):
        Cluster(load_config(None, values), processes).start()
    assert not processes.specs


class JoinedProcesses(FakeProcesses):
    """Two hosts at each look until the third one joins, with the fifth look or never."""

    looks, joins = 0, True

    @property
    def hosts(self) -> Sequence[str]:
        return ["10.0.0.1", "10.0.0.2"]

    def hosts_for(self, where: Where) -> Sequence[str]:
        assert where == Where(resources={"NIC": 1.0})
        self.looks += 1
        return [*self.hosts, *["10.0.0.3"] * (self.joins and self.looks >= 5)]


def test_a_start_waits_for_hosts_that_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.cluster.supervision.network.JOIN_POLL_SECONDS", 0.001)
    values = {"island.node_resources": {"NIC": 1.0}, "ray.min_hosts": 3, "ray.join_seconds": 0.05}
    processes = JoinedProcesses()
    wait_for_hosts(load_config(None, values | {"ray.join_seconds": 60.0}), processes)
    assert processes.looks == 5
    processes.joins = False
    with pytest.raises(
        StartFailed, match=r"^2 of 3 hosts \(ray.min_hosts\) have joined within 0.05 s .*: 10.0.0.1, 10.0"
    ):
        wait_for_hosts(load_config(None, values), processes)
    with pytest.raises(StartFailed, match=r"^1 of 2 hosts .* none can join a Ray on loopback"):
        wait_for_hosts(load_config(None, {"ray.min_hosts": 2}), FakeProcesses())


def test_pages_that_no_machine_holds(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    values = {"model.path": str(tmp_path / "model"), "cache.num_pages": 1 << 24, "cache.page_size": 128}
    processes = FakeProcesses()
    with pytest.raises(ConfigError, match=r"^cache\.num_pages is 16777216; .* GiB in each worker, .*: set at most \d+"):
        Cluster(load_config(None, values), processes).start()
    assert not processes.specs


def test_files_of_embeddings_that_cannot_be_read(tmp_path: Path) -> None:
    """Else gateways would find out, once all weights are loaded."""
    make_checkpoint(tmp_path / "model")
    (tmp_path / "model" / "config_sentence_transformers.json").write_text("{")
    values, processes = {"model.path": str(tmp_path / "model"), "cache.num_pages": 64}, FakeProcesses()
    with pytest.raises(ConfigError, match=r"^model\.path: .*config_sentence_transformers\.json"):
        Cluster(load_config(None, values), processes).start()
    assert not processes.specs


def test_pages_of_states_that_no_machine_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each sequence, and snapshots in a share of what the pages of K and V take."""
    make_checkpoint(tmp_path / "model", "qwen3_next")
    values = {"model.path": str(tmp_path / "model"), "cache.num_pages": 64, "cache.state_share": 1.0}
    layout = kv_layout(load_model_config(tmp_path / "model"), 16)
    kv, state = layout.page_bytes(0), layout.page_bytes(1)
    there = 64 * (kv + state) - 1  # no more sequences than pages
    with_snapshots = max(count for count in range(64) if count * (kv + state) + count * kv // state * state <= there)
    monkeypatch.setattr(process_settings, "machine_memory", lambda: there)
    for more, fewer in (
        ({"cache.state_interval": None}, 63),
        ({"cache.prefix_sharing": False}, 63),
        ({}, with_snapshots),
    ):
        with pytest.raises(ConfigError, match=rf"cache\.num_pages is 64; .*: set at most {fewer}"):
            Cluster(load_config(None, {**values, **more}), FakeProcesses()).start()


@pytest.mark.parametrize("num_bytes", [1, 1 << 40])
def test_host_bytes_that_hold_nothing_or_are_not_there(num_bytes: int, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    values = {"model.path": str(tmp_path / "model"), "cache.num_pages": 64, "cache.host_bytes": num_bytes}
    processes = FakeProcesses()
    with pytest.raises(ConfigError, match=rf"^cache\.host_bytes is {num_bytes}; .*: set from \d+ to \d+"):
        Cluster(load_config(None, values), processes).start()
    assert not processes.specs


def test_host_bytes_of_workers_that_are_not_there_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker's alone would be."""
    make_checkpoint(tmp_path / "model")
    monkeypatch.setattr(process_settings, "machine_memory", lambda: 4 << 30)
    values = {"model.path": str(tmp_path / "model"), "cache.num_pages": 64, "cache.host_bytes": 3 << 30}
    processes, most = FakeProcesses(), ((4 << 30) - 1) // 3
    with pytest.raises(
        ConfigError, match=rf"^cache\.host_bytes is {3 << 30} in each of 3 workers, .* 4\.0 GiB: set at most {most}"
    ):
        Cluster(load_config(None, {**values, "island.num_decode": 2}), processes).start()
    left = ((1 << 30) - 1) // 2
    both = {"cache.host_bytes": 1 << 30, "cache.parked_bytes": 1 << 30, "island.num_decode": 2}
    with pytest.raises(
        ConfigError, match=rf"^cache\.parked_bytes is {1 << 30} in each of 2 workers, .*: set at most {left}"
    ):
        Cluster(load_config(None, {**values, **both}), processes).start()
    assert not processes.specs


def test_host_memory_of_gpu_workers_counts_what_they_take_by_default_and_for_adapters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A quarter is for prefixes; what is for adapters is pinned at the start. CPUs take it as it is used."""
    monkeypatch.setattr(process_settings, "machine_memory", lambda: 8 << 30)
    on_gpus = {"island.device": "cuda", "island.transport": "nvshmem", "adapters.max_resident": 4}
    left = (6 << 30) - 1
    for more, key, most in (
        ({}, "adapters.host_bytes", left // 2),
        ({"cache.parked_bytes": 4 << 30, "adapters.host_bytes": 1 << 30}, "adapters.host_bytes", ((2 << 30) - 1) // 2),
        ({"cache.parked_bytes": 7 << 30}, "cache.parked_bytes", left),
    ):
        with pytest.raises(ConfigError, match=rf"^{key} is \d+ in each of .* 8\.0 GiB: set at most {most}"):
            process_settings.check_host_bytes(load_config(None, on_gpus | more))
    process_settings.check_host_bytes(load_config(None, on_gpus | {"adapters.host_bytes": 3 << 29}))
    process_settings.check_host_bytes(load_config(None, {"adapters.max_resident": 4}))


def test_disk_bytes_of_workers_that_are_not_there_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path / "model")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5000))
    (tmp_path / "left.pages").write_bytes(bytes(1001))
    values = {"model.path": str(tmp_path / "model"), "cache.host_bytes": 1 << 20, "cache.disk_path": str(tmp_path)}
    processes = FakeProcesses()
    expected = rf"^cache\.disk_bytes is 4000 for each of 2 workers; the disk of {tmp_path} .* 6001: set at most 3000"
    with pytest.raises(ConfigError, match=expected):
        Cluster(load_config(None, {**values, "cache.disk_bytes": 4000}), processes).start()
    assert not processes.specs


@pytest.mark.parametrize(("key", "value", "shown"), [("state_interval", None, "null"), ("state_share", 0.0, "0")])
def test_host_bytes_of_a_model_with_states_and_no_snapshots(
    key: str, value: object, shown: str, tmp_path: Path
) -> None:
    """They would stay empty."""
    make_checkpoint(tmp_path / "model", "qwen3_next")
    values = {"model.path": str(tmp_path / "model"), "cache.host_bytes": 1 << 20, f"cache.{key}": value}
    with pytest.raises(ConfigError, match=rf"^cache\.host_bytes is 1048576; .* null where cache\.{key} is {shown} and"):
        Cluster(load_config(None, values), FakeProcesses()).start()


def test_an_island_lost_before_the_gateway_is_there(tmp_path: Path) -> None:
    """The gateway keeps its number of pages."""
    make_checkpoint(tmp_path / "model")
    values = {"model.path": str(tmp_path / "model"), "cache.num_pages": 77, "gateway.port": 0, "gateway.processes": 1}
    processes = FakeProcesses(fails={"local/local.2/decode (PE 1)": OSError("slow")})
    cluster = Cluster(load_config(None, values), processes)

    def lose(_: object) -> None:
        assert cluster._islands is not None
        (island,) = cluster._islands.all
        island.ready.result(60)
        first = island.island
        named(processes, "prefill (PE 0)").kill()
        until(lambda: island.island is not first)

    cluster.start(lose)
    try:
        assert ("serve", (77,)) in named(processes, "/gateway.").calls
    finally:
        cluster.stop()


def named(processes: FakeProcesses, part: str) -> FakeProcess:
    """The first process whose name has that part."""
    found = (member for group in processes.groups for member in group.members)
    return next(member for member in found if part in member.name)


def test_the_gateway_starts_beside_the_workers(tmp_path: Path) -> None:
    """Its process is there while workers read weights, and it serves once it knows their pages."""
    make_checkpoint(tmp_path / "model")
    values = {"model.path": str(tmp_path / "model"), "cache.num_pages": 77, "gateway.port": 0}
    processes, workers_load = FakeProcesses(silent={"load"}), list[FakeProcess]()
    cluster = Cluster(load_config(None, values), processes)

    def look(_: object) -> None:
        if workers_load:
            return
        until(lambda: len(processes.groups) == 2)
        gateway = named(processes, "/gateway.")
        workers_load.extend(named(processes, part) for part in ("prefill", "decode"))
        until(lambda: all(worker.awaits("load") for worker in workers_load))
        assert "serve" not in [method for method, _ in gateway.calls]
        for worker in workers_load:
            worker.answer_pending("load", None)

    cluster.start(look)
    try:
        assert ("serve", (77,)) in named(processes, "/gateway.").calls
    finally:
        cluster.stop()
    assert workers_load


def test_workers_wait_for_kernels_after_their_weights(tmp_path: Path) -> None:
    """Processes start and read weights while the host compiles; no forward comes before its kernels."""
    make_checkpoint(tmp_path / "model")
    values = {"model.path": str(tmp_path / "model"), "cache.num_pages": 77, "gateway.port": 0}
    processes, built = FakeProcesses(), Future[None]()
    cluster = Cluster(load_config(None, values), processes)

    def look(_: object) -> None:
        if built.done():
            return
        until(lambda: "builds" in phases)
        for part in ("prefill", "decode"):
            called = [method for method, _ in named(processes, part).calls]
            assert "load" in called
            assert "open" not in called
        built.set_result(None)

    phases: list[str] = []
    cluster.clock.listener = phases.append
    cluster.start(look, lambda: built)
    cluster.stop()
    assert phases.index("weights") < phases.index("builds") < phases.index("island")
    assert "builds" in cluster.clock.seconds


def test_the_largest_forward_does_not_wait_for_kernels_of_attention(tmp_path: Path) -> None:
    """Its own kernels compile beside those, and a GPU that is too small is reported before they are ready."""
    make_checkpoint(tmp_path / "model", dtype="bfloat16")
    on_gpus = {"island.device": "cuda", "island.transport": "nixl"}
    values = {"model.path": str(tmp_path / "model"), "gateway.port": 0, **on_gpus}
    processes, built = FakeProcesses(answers=room_of_each(itertools.repeat(200))), Future[None]()
    cluster = Cluster(load_config(None, values), processes)
    called: list[str] = []

    def look(_: object) -> None:
        if not built.done():
            until(lambda: "builds" in phases)
            called.extend(method for part in ("prefill", "decode") for method, _ in named(processes, part).calls)
            built.set_result(None)

    phases: list[str] = []
    cluster.clock.listener = phases.append
    cluster.start(look, lambda: built)
    cluster.stop()
    assert called.count("pages_that_fit") == 2
    assert "open" not in called
    assert [phase for phase in phases if phase in ("memory", "builds", "island")] == ["memory", "builds", "island"]
    calls = [method for part in ("prefill", "decode") for method, _ in named(processes, part).calls]
    assert calls.count("pages_that_fit") == 2


def test_kernels_that_are_there_have_no_phase_and_a_failed_plan_ends_the_start(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    values = {"model.path": str(tmp_path / "model"), "gateway.port": 0}
    done, failed, pending = Future[None](), Future[None](), Future[None]()
    done.set_result(None)
    failed.set_exception(ConfigError("cache.page_size is odd"))
    cluster = Cluster(load_config(None, values), FakeProcesses())
    cluster.start(None, lambda: done)
    cluster.stop()
    assert "builds" not in cluster.clock.seconds
    with pytest.raises(ConfigError, match="page_size is odd"):
        Cluster(load_config(None, values), FakeProcesses()).start(None, lambda: failed)
    with pytest.raises(StartFailed):
        Cluster(load_config(None, values), CrampedProcesses()).start(None, lambda: pending)
    assert pending.cancelled()


def test_a_gateway_that_fails_ends_a_start_whose_workers_still_load(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    values = {"model.path": str(tmp_path / "model"), "gateway.port": 0, "recovery.unresponsive_seconds": 60}
    processes = FakeProcesses(silent={"load"})
    cluster = Cluster(load_config(None, values), processes)

    def lose(_: object) -> None:
        until(lambda: len(processes.groups) == 2)
        named(processes, "/gateway.").kill()

    with pytest.raises(ProcessEnded, match=r"gateway"):
        cluster.start(lose)
    assert all(member.killed for group in processes.groups for member in group.members)


def test_drafters_that_do_not_fit(tmp_path: Path) -> None:
    target, other = tmp_path / "model", tmp_path / "other"
    make_checkpoint(target)
    make_checkpoint(other)
    values = {"model.path": str(target), "speculation.method": "draft_model", "speculation.draft": str(other)}
    processes = FakeProcesses()

    def refused(pattern: str) -> None:
        with pytest.raises(ConfigError, match=pattern):
            Cluster(load_config(None, values), processes).start()

    fields = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(fields | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}))
    refused(r"^speculation\.draft: .* RoPE of type dynamic.* give a drafter with another type")
    (other / "config.json").write_text(json.dumps(fields | {"vocab_size": 7}))
    refused(r"^speculation\.draft: .*tensor .* has shape")
    (other / "config.json").unlink()
    refused(r"^speculation\.draft: .*config\.json")
    (other / "config.json").write_text(json.dumps(fields))
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append(
        dict(tokenizer["added_tokens"][-1], id=len(tokenizer["model"]["vocab"]) + 9, content="<|other|>")
    )
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    refused(r"^speculation\.draft is .*other; it must be a model with the tokenizer of model\.path")
    assert not processes.specs


def test_heads_that_do_not_fit(tmp_path: Path) -> None:
    target, mtp, head = tmp_path / "target", tmp_path / "mtp", tmp_path / "head"
    make_checkpoint(target)
    save_mtp(mtp)
    save_eagle3(head, whole_vocab=False)
    processes = FakeProcesses()

    def refused(pattern: str, model: Path, method: str, draft: Path | None = None) -> None:
        values = {"model.path": str(model), "speculation.method": method}
        if draft is not None:
            values["speculation.draft"] = str(draft)
        with pytest.raises(ConfigError, match=pattern):
            Cluster(load_config(None, values), processes).start()

    refused(r"^speculation\.method: .* LlamaForCausalLM has 0 layers .* give a checkpoint with 1 ", target, "mtp")
    tensors = load_file(mtp / "model.safetensors")
    del tensors["model.layers.2.eh_proj.weight"]
    save_file(tensors, mtp / "model.safetensors")
    refused(r"^speculation\.method: the checkpoint lacks model\.layers\.2\.eh_proj\.weight", mtp, "mtp")
    refused(r"^speculation\.draft: .*head: vocab_size is 199; it must be that of the target", target, "eagle3", head)
    refused(r"^speculation\.draft: .*architectures.* an EAGLE-3 head", target, "eagle3", target)
    deep = tmp_path / "deep"
    make_model("llama").save_pretrained(deep)
    refused(r"^speculation\.draft: .* has 2 layers, and a head takes", deep, "eagle3", head)
    make_model("llama", num_hidden_layers=8).save_pretrained(deep)
    tensors = load_file(head / "model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if name != "fc.weight"}, head / "model.safetensors")
    refused(r"^speculation\.draft: the checkpoint lacks fc\.weight", deep, "eagle3", head)
    assert not processes.specs


class TwoHosts(FakeProcesses):
    """Two hosts, and a third where no island may go."""

    @property
    def hosts(self) -> Sequence[str]:
        return "10.0.0.1", "10.0.0.2", "10.0.0.3"

    def hosts_for(self, where: Where) -> Sequence[str]:
        return self.hosts if where.labels != {"zone": "north"} else self.hosts[:2]


@pytest.mark.parametrize(
    ("settings", "workers"),
    [({}, 4), ({"island.node_labels": {"zone": "north"}}, 6), ({"island.network": "loopback"}, 10)],
)
def test_workers_share_the_cores_of_their_own_host(tmp_path: Path, settings: dict[str, Any], workers: int) -> None:
    """None of them is told how many cores the launcher's host has."""
    make_checkpoint(tmp_path / "model")
    values = {"model.path": str(tmp_path / "model"), "num_islands": 5, "gateway.port": 0, "gateway.processes": 1}
    processes = TwoHosts()
    cluster = Cluster(load_config(None, values | settings), processes)
    cluster.start()
    try:
        told = [spec.argument for specs in processes.specs for spec in specs if "/gateway." not in spec.name]
    finally:
        cluster.stop()
    assert len(told) == 10
    assert {(one.threads, one.workers_on_host) for one in told if isinstance(one, WorkerConfig)} == {(None, workers)}
