"""Tests what `tandem up` finds before torch and Ray are imported. The words count: an operator has nothing else."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.cache.kernels.build.nvml import Driver, Gpu
from tandem.cluster.cli import foreground, preflight, rank_room
from tandem.cluster.cli.commands import main
from tandem.cluster.cli.preflight import check_host, check_ray, fitting_config
from tandem.cluster.config.cluster_config import ClusterConfig, load_config
from tandem.cluster.errors import ConfigError, StartFailed
from tandem.cluster.tools.architectures import MTP_FIELDS, SIZES, config_fields

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
FIELDS = {"architectures": ["LlamaForCausalLM"], **SIZES["tiny"]}
H200 = Gpu("H200", 139 << 30, (9, 0))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(FIELDS))
    (folder / "tokenizer.json").touch()
    (folder / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")
    return folder


@pytest.fixture(autouse=True)
def _of_any_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes a host that has all packages, and whose limit of files stays."""
    monkeypatch.setattr(preflight, "find_spec", lambda package: package)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def config_of(model: Path, name: str = "local.yaml", **keys: object) -> ClusterConfig:
    return load_config(DEPLOY / name, {"model.path": str(model), "gateway.port": 0, **keys})


def refused(config: ClusterConfig, kind: type[Exception] = ConfigError) -> str:
    with pytest.raises(kind) as caught:
        check_host(config, own_ray=True)
    return str(caught.value)


def free(monkeypatch: pytest.MonkeyPatch, folder: str, size: int) -> None:
    """Lets a folder have so many bytes free, and all others plenty."""

    def statvfs(path: Path) -> SimpleNamespace:
        return SimpleNamespace(f_frsize=1, f_bavail=size if str(path) == folder else 1 << 50)

    monkeypatch.setattr(preflight.os, "statvfs", statvfs)


def test_nothing_heavy_is_imported() -> None:
    script = "import sys, tandem.cluster.cli.foreground; print({'torch', 'ray', 'tokenizers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"


def test_a_good_host_has_only_warnings(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, "", 0)
    monkeypatch.setattr(preflight, "raise_file_limit", lambda: 1 << 16)
    monkeypatch.setattr(preflight.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    assert check_host(config_of(model), own_ray=True) == []
    monkeypatch.setattr(preflight.os, "getloadavg", lambda: (99.0, 0.0, 0.0))
    (busy,) = check_host(config_of(model), own_ray=True)
    assert busy.startswith("this host is busy, a load of 99 on ")


def test_ranks_that_share_cores_are_warned_of(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, "", 0)
    monkeypatch.setattr(preflight.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(rank_room.os, "sched_getaffinity", lambda pid: {0, 1, 2})
    several = config_of(model, "local.yaml", **{"island.prefill_ranks": 2, "island.decode_ranks": 2})
    (warning,) = check_host(several, own_ray=True)
    assert "the workers are 4 processes, and this host has 3 cores" in warning
    assert not check_host(several, own_ray=False)
    assert not check_host(config_of(model, "local.yaml", **{"island.decode_ranks": 2}), own_ray=True)


def test_ranks_on_a_host_without_a_compiler_are_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_room.shutil, "which", lambda name: None)
    found = refused(config_of(model, "local.yaml", **{"island.decode_ranks": 2}), StartFailed)
    assert found == (
        "island.prefill_ranks is 1, decode_ranks 2; this host has no C compiler, which several ranks on CPUs need: "
        "install gcc, or set both to 1"
    )


def test_workers_that_share_cores_are_counted(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, "", 0)
    monkeypatch.setattr(preflight.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(rank_room.os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(rank_room.os, "cpu_count", lambda: 2)
    (warning,) = check_host(config_of(model, "local.yaml", **{"island.num_prefill": 19}), own_ray=True)
    assert "the workers are 20 processes that compute, and this host has 2 cores: with more than 2" in warning
    assert "Ray's 0.1 CPU for a worker is a count, and no limit" in warning
    assert refused(config_of(model, "local.yaml", **{"island.num_prefill": 50})) == (
        "num_islands is 1, each with island.num_prefill 50 and island.num_decode 1: 51 worker processes. Ray counts "
        "0.1 CPU for each, and has 2 here: start at most 20 workers, or set ray.num_cpus to at least 6, which makes no "
        "worker faster"
    )
    check_host(config_of(model, "local.yaml", **{"island.num_prefill": 50, "ray.num_cpus": 6}), own_ray=True)
    check_host(config_of(model, "local.yaml", **{"island.num_prefill": 50}), own_ray=False)


def test_a_model_without_a_tokenizer_is_warned_of(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    warning, *_ = check_host(config_of(model), own_ray=False)
    assert warning == "the model has no tokenizer.json: prompts and answers are token ids alone, and chats are refused"


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nobody.invalid:6379", "127.0.0.1", "ray://127.0.0.1:x"])
def test_an_address_without_a_ray(address: str) -> None:
    with pytest.raises(StartFailed, match=re.escape(f"--address is {address!r}: ")):
        check_ray(address)
    check_ray("auto")
    check_ray(None)


UP = """
import sys
from tandem.cluster.cli.commands import main
try:
    main(sys.argv[1:])
finally:
    print({"torch", "ray", "tokenizers"} & set(sys.modules))
"""


def test_an_error_comes_before_torch_and_ray(model: Path, runtime_folder: Path) -> None:
    """Importing both takes seconds, on a busy host a minute."""
    (model / "config.json").write_text(json.dumps({**FIELDS, "max_position_embeddings": 16}))
    words = (
        "up",
        str(DEPLOY / "local.yaml"),
        "--model",
        str(model),
        "--set",
        "model.max_model_len=17",
        "--grpc-port=0",
    )
    command = [sys.executable, "-c", UP, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.splitlines()[-1] == "tandem: model.max_model_len is 17; the checkpoint takes at most 16"
    assert (done.returncode, done.stdout) == (2, "set()\n")


def test_a_transport_without_its_package(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "find_spec", lambda package: None)
    check_host(config_of(model), own_ray=True)
    nixl = config_of(model, **{"island.transport": "nixl"})
    assert refused(nixl) == (
        "island.transport is 'nixl'; its package nixl is not installed: pip install 'tandem-serve[nixl]'"
    )
    check_host(nixl, own_ray=False)


def test_ranks_and_drafts_that_config_json_rules_out(model: Path) -> None:
    assert refused(config_of(model, "local.yaml", **{"island.decode_ranks": 3})) == (
        "island.decode_ranks is 3; it must divide the model's num_attention_heads, 4"
    )
    mtp = config_of(model, **{"speculation.method": "mtp"})
    assert refused(mtp).startswith("speculation.method is 'mtp'; LlamaForCausalLM has no layer for multi-token")
    for arch in MTP_FIELDS:  # whose config.json may leave the field out
        (model / "config.json").write_text(json.dumps(config_fields(arch, "tiny", "float32")))
        check_host(mtp, own_ray=True)


def test_errors_show_the_path_that_was_typed(
    model: Path, runtime_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (model.parent / "beside").mkdir()
    monkeypatch.chdir(model.parent / "beside")
    monkeypatch.setattr(foreground.logging, "basicConfig", lambda **_: None)
    monkeypatch.setattr(foreground, "set_title", lambda _: None)
    (model / "config.json").write_text("{")
    with pytest.raises(SystemExit, match="2"):
        main(["up", str(DEPLOY / "local.yaml"), "--model", "../model", "--grpc-port=0"])
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "model.path" in line)
    assert line.startswith("tandem: model.path: ../model/config.json is not readable JSON: ")


@pytest.mark.parametrize("key", ["gateway.host", "metrics.host"])
def test_plain_text_on_a_network_is_warned_of(model: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setattr(preflight, "check_ports", lambda *_: None)
    keys = {"security.api_key": "k" * 16, "security.tls_at_proxy": True, "metrics.port": 0}
    for host in ("127.0.0.1", "0.0.0.0"):
        warnings = check_host(config_of(model, **keys, **{key: host}), own_ray=True)
        assert any(f"{key} is '{host}': tokens, prompts" in line for line in warnings) == (host == "0.0.0.0")


def test_a_model_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "there is no such folder: give the folder of a Hugging Face checkpoint" in refused(config_of(tmp_path / "x"))
    hub = refused(config_of(Path("Nobody/nothing-1b")))
    assert "if Nobody/nothing-1b is a hub id, `hf download Nobody/nothing-1b` brings it into the cache " in hub
    (tmp_path / "file").touch()
    assert "it is a file" in refused(config_of(tmp_path / "file"))


def test_a_folder_that_is_no_checkpoint(model: Path) -> None:
    (model / "model.safetensors").rename(model / "model.gguf")
    assert "which has no *.safetensors: download them, or try random weights" in refused(config_of(model))
    assert not list(preflight._check_model(config_of(model, **{"model.load_format": "dummy"}).model))
    (model / "config.json").unlink()
    assert "which has no config.json; it has .gguf files, which are not served" in refused(config_of(model))


def test_a_draft_that_is_not_there(model: Path, tmp_path: Path) -> None:
    asked = {"speculation.method": "draft_model", "speculation.draft": str(tmp_path / "x")}
    assert refused(config_of(model, **asked)) == f"speculation.draft: {tmp_path}/x/config.json is not there"


@pytest.mark.parametrize(
    ("gpus", "visible", "found", "runs"),
    [
        (0, None, "this host has no GPU, or no NVIDIA driver", "deploy/local.yaml runs here"),
        (1, None, "this host has 1:", "deploy/gpu-1.yaml runs here"),
        (2, None, "this host has 2:", "deploy/gpu-1p1d.yaml runs here"),
        (4, "0,1", "this host has 2 (4 without CUDA_VISIBLE_DEVICES)", "deploy/gpu-1p1d.yaml runs here"),
    ],
)
def test_gpus_that_are_missing(
    model: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, visible: str | None, found: str, runs: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(preflight, "read_driver", lambda: Driver("580.1" if gpus else "", (H200,) * gpus))
    said = refused(config_of(model, "gpu-2p2d.yaml"))
    assert "island.device is cuda and the workers need 4 GPUs; " in said
    assert found in said
    assert runs in said
    check_host(config_of(model, "gpu-2p2d.yaml"), own_ray=False)  # the Ray that is joined has them, perhaps


def test_gpus_that_are_enough(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert not list(preflight._check_gpus(config_of(model, "gpu-1p1d.yaml"), Driver("580.1", (H200, H200))))
    assert [fitting_config(count) for count in (0, 1, 2, 3, 4, 9)] == [
        "deploy/local.yaml",
        "deploy/gpu-1.yaml",
        *["deploy/gpu-1p1d.yaml"] * 2,
        *["deploy/gpu-2p2d.yaml"] * 2,
    ]


def test_the_file_limit_is_raised_or_said(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    limit = preflight.raise_file_limit()
    assert limit == resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 256
    monkeypatch.setattr(preflight, "raise_file_limit", lambda: 400)
    assert "the limit of open files is 400; at least 1024 are needed: raise it with `ulimit -n" in refused(
        config_of(model), StartFailed
    )
    monkeypatch.setattr(preflight, "raise_file_limit", lambda: 4096)
    warning, *_ = check_host(config_of(model), own_ray=True)
    assert "fewer clients than gateway.max_calls, 4096, can connect at a time; `ulimit -n 5120`" in warning


def test_a_full_disk_and_little_shared_memory(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    free(monkeypatch, str(tmp_path), 5 << 20)
    said = refused(config_of(model), StartFailed)
    assert said == (
        f"{tmp_path} has 5 MiB free; at least 256 are needed: free some, or set RAY_TMPDIR to another folder for Ray's "
        "files"
    )
    free(monkeypatch, "/dev/shm", 64 << 20)
    warnings = check_host(config_of(model), own_ray=True)
    assert "/dev/shm has less than 80 MiB free: Ray keeps its objects in its temporary folder" in warnings
    monkeypatch.setattr(preflight, "read_driver", lambda: Driver("580.1", (H200, H200)))
    said = refused(config_of(model, "gpu-1p1d.yaml"), StartFailed)
    assert said.startswith("/dev/shm has 64 MiB free; at least 256 are needed: ")
    monkeypatch.setenv("TANDEM_KERNEL_CACHE", str(tmp_path / "new" / "kernels"))
    monkeypatch.delenv("RAY_TMPDIR")
    free(monkeypatch, str(tmp_path), 5 << 20)
    assert "set TANDEM_KERNEL_CACHE to another folder" in refused(config_of(model, "gpu-1p1d.yaml"), StartFailed)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    monkeypatch.setenv("RAY_TMPDIR", str(closed))
    assert f"{closed} cannot be written" in refused(config_of(model), StartFailed)


def test_a_folder_for_logs_has_room_and_is_one(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Processes would open their logs after minutes of a start."""
    monkeypatch.setattr(preflight.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    logs = tmp_path / "logs"
    config = config_of(model, **{"logging.folder": str(logs)})
    assert not check_host(config, own_ray=False)
    logs.touch()
    advice = "; set logging.folder to another one; null leaves logs to Ray"
    assert refused(config, StartFailed) == f"logging.folder: {logs} is no folder{advice}"
    logs.unlink()
    free(monkeypatch, str(tmp_path), 5 << 20)
    assert f"logging.folder: {logs} has 5 MiB free; at least 64 are needed: set" in refused(config, StartFailed)


def test_a_folder_without_an_adapter_is_named(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    config = config_of(model, **{"adapters.max_resident": 2, "adapters.folders": {"x": str(folder)}})
    assert refused(config) == f"adapters.folders.x: path is {folder}; it must be the folder of a PEFT adapter"
    folder.mkdir()
    assert refused(config) == f"adapters.folders.x: {folder}/adapter_config.json is not there"
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    (folder / "adapter_model.bin").touch()
    assert refused(config) == (
        f"adapters.folders.x: {folder} has no adapter_model.safetensors, but adapter_model.bin, a pickle, which is "
        "never read; give a PEFT adapter with safetensors"
    )


def test_host_memory_that_holds_no_adapter_is_too_small(model: Path) -> None:
    """Workers would say so after they have read their weights."""
    fields: dict[str, Any] = FIELDS
    hidden, layers = fields["hidden_size"], fields["num_hidden_layers"]
    shapes = {"self_attn.q_proj": [hidden, hidden], "mlp.down_proj": [hidden, 4 * hidden], "self_attn.q_norm": [64]}
    names = {
        f"model.layers.{layer}.{name}.weight": shape for layer in range(layers + 1) for name, shape in shapes.items()
    }
    tensors = {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in names.items()}
    header = json.dumps(tensors).encode()
    keys: dict[str, Any] = {
        "adapters.max_resident": 2,
        "adapters.max_rank": 512,
        "adapters.host_bytes": 1 << 20,
        "model.dtype": "float32",
        "model.load_format": "dummy",
    }
    config = config_of(model, **keys)
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    needed = 4 * 512 * 7 * hidden * layers  # not of the layer beyond the last, which is for drafts
    assert needed > 1 << 20
    assert refused(config) == (
        f"adapters.host_bytes is 1048576; it must be at least {needed}, the bytes of one adapter of rank 512 "
        "(adapters.max_rank)"
    )
    keys["island.decode_ranks"] = 2
    divided = config_of(model, **keys)
    del keys["island.decode_ranks"]
    assert f"it must be at least {2 * 4 * 512 * 9 * hidden * layers // 2}, " in refused(divided)
    assert refused(divided).endswith("(adapters.max_rank) on each of the 2 ranks of a worker")
    keys["adapters.host_bytes"] = needed
    preflight.check_model(config_of(model, **keys))


def test_a_folder_for_prefixes_is_one(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each worker would refuse it after it has read its weights."""
    monkeypatch.setattr(preflight.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    pages = tmp_path / "pages"
    keys = {"cache.host_bytes": 1 << 20, "cache.disk_path": str(pages), "cache.disk_bytes": 1 << 20}
    config = config_of(model, **keys)
    check_host(config, own_ray=True)
    pages.touch()
    wrong = f"cache.disk_path: {pages} is no folder; set cache.disk_path to another one"
    assert refused(config, StartFailed) == wrong
    check_host(config, own_ray=False)  # the workers may be on other hosts


def test_a_disk_has_room_for_the_prefixes_of_all_workers(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What earlier workers have left there counts as room. A file that is listed may be gone a moment later."""
    monkeypatch.setattr(preflight.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5000))
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "left.pages").write_bytes(bytes(1001))
    (tmp_path / "pages" / "gone.pages").symlink_to("nowhere")
    keys: dict[str, Any] = {"cache.host_bytes": 1 << 20, "cache.disk_bytes": 3001}
    keys["cache.disk_path"] = str(tmp_path / "pages")
    assert refused(config_of(model, **keys)) == (
        f"cache.disk_bytes is 3001 for each of 2 workers; the disk of {tmp_path}/pages has room for 6001: set at most "
        "3000"
    )
    check_host(config_of(model, **keys), own_ray=False)
    keys["cache.disk_bytes"] = 3000
    check_host(config_of(model, **keys), own_ray=True)


def test_a_folder_for_records_has_room_for_one_of_each_worker(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keys = {"num_islands": 2, "island.num_prefill": 1, "island.num_decode": 2, "scaling.max_islands": 2}
    config = config_of(model, **{"record.folder": str(tmp_path), "record.max_mib": 100, **keys})
    free(monkeypatch, str(tmp_path), 600 << 20)
    check_host(config, own_ray=True)
    free(monkeypatch, str(tmp_path), 599 << 20)
    assert refused(config, StartFailed) == (
        f"record.folder: {tmp_path} has 599 MiB free; at least 600 are needed: set record.folder to another one, or "
        "record.max_mib, 100 for each of 6 workers, to less"
    )
    check_host(config, own_ray=False)  # the workers may be on other hosts
    free(monkeypatch, str(tmp_path), 99 << 20)
    with pytest.raises(StartFailed, match=r"99 MiB free; at least 100 are needed: .*, 100 for a worker, to less"):
        check_host(config, own_ray=False)


FULL = replace(H200, used=130 << 30, holders=((os.getpid(), 129 << 30), (1 << 30, 0)))


def weights(model: Path, gib: int, dtype: str = "BF16") -> None:
    """Writes a file with only a header: the rest is a hole."""
    count, size = (gib << 30) // 2, {"BF16": 2, "F32": 4}[dtype]
    header = json.dumps({"w": {"dtype": dtype, "shape": [count], "data_offsets": [0, size * count]}}).encode()
    with (model / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size * count)


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_gpus_that_others_fill(model: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    weights(model, 16, dtype)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(preflight, "read_driver", lambda: Driver("580.1", (FULL, H200, H200)))
    command = Path("/proc/self/comm").read_text().strip()
    said = refused(config_of(model, "gpu-1p1d.yaml"))
    assert said == (
        f"GPU 0 (H200, 139.0 GiB) has 130.0 GiB in use by process {os.getpid()} ({command}) 129.0 GiB, process "
        f"{1 << 30}; a worker needs at least 19.2 GiB of 125.1 GiB there, 16.0 GiB of it for weights: set "
        "CUDA_VISIBLE_DEVICES=1,2, or end those processes; no model would fit here"
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    check_host(config_of(model, "gpu-1p1d.yaml"), own_ray=True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert "end those processes, or take a smaller model; no model" in refused(config_of(model, "gpu-1p1d.yaml"))
    check_host(config_of(model, "gpu-1p1d.yaml"), own_ray=True, beside=frozenset({1}))  # another one ends for it


def test_a_model_that_is_larger_than_what_is_left(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    half = replace(H200, used=100 << 30)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(preflight, "read_driver", lambda: Driver("580.1", (half, half)))
    weights(model, 22)
    said = refused(config_of(model, "gpu-1p1d.yaml"))
    assert said.count("take a smaller model; weights of less than 21.8 GiB would fit") == 2
    weights(model, 21)
    check_host(config_of(model, "gpu-1p1d.yaml"), own_ray=True)
    weights(model, 38)
    check_host(config_of(model, "gpu-1p1d.yaml", **{"cache.num_pages": 100}), own_ray=True)
