"""`tandem up` and the commands beside it, as a person types them. What runs is a process; what is refused is none."""

import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import grpc
import psutil
import pytest
import ray

from tandem.cache.kernels.build.nvml import Driver, Gpu
from tandem.cluster.cli import preflight
from tandem.cluster.cli.commands import main
from tandem.cluster.cli.runtime_dir import running_cluster
from tandem.cluster.client import Client
from tandem.cluster.errors import StartFailed, Unavailable
from tandem.cluster.processes.ray_processes import RayProcesses
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tandem.proto import inference_pb2
from tests.support.client_requests import GREEDY
from tests.support.http_client import COMPLETIONS, chunks
from tests.support.oracle import greedy, load_oracle
from tests.support.process_hosts import process_host_of
from tests.support.shm import lasting_names

CONFIG = Path(__file__).resolve().parents[2] / "deploy" / "local.yaml"
PHASES = ["command", "host", "imports", "checkpoint", "ray"]
PHASES += ["processes, imports", "weights", "island", "kernels", "gateway"]
TANDEM = [sys.executable, "-m", "tandem.cluster.cli"]


def run(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*TANDEM, *arguments], input=text, capture_output=True, text=True, timeout=90, check=False)


@dataclass(frozen=True)
class Up:
    """A running `tandem up`. http: empty without an HTTP server; shm: the names in /dev/shm before it."""

    name: str
    process: subprocess.Popen[str]
    address: str
    http: str
    shm: set[str]

    @property
    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@contextmanager
def up(
    model: Path, *settings: str, address: str | None = None, environ: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Up]:
    """Runs a cluster of its own name until it is ready. address: of the Ray that it joins; then it has no HTTP
    server."""
    shm = lasting_names()
    command = [*TANDEM, "up", str(CONFIG), "--model", str(model), "--grpc-port", "0"]
    name = f"up-{os.getpid()}-{secrets.token_hex(3)}"  # one that a failed test leaves running is in nobody's way
    for option in (f"name={name}", "cache.num_pages=64", "ray.num_cpus=2", *settings):
        command += ["--set", option]
    command += ["--http-port", "0"] if address is None else ["--address", address]
    elsewhere = os.environ | {"RAY_ADDRESS": "127.0.0.1:1", **environ}  # a Ray that nobody has asked to join
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=elsewhere)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        http = r" http=(\S+:\d+)" if address is None else "()"
        found = re.fullmatch(rf"ready grpc=(\S+:\d+){http}\n", line)
        assert found, f"no ready line but {line!r}; stderr: {process.communicate(timeout=60)[1]}"
        yield Up(name, process, found[1], found[2], shm)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


@pytest.fixture(scope="module")
def running(small_model: Path) -> Iterator[Up]:
    """Runs one cluster for all tests but the last, which ends it, because starting a Ray takes long. Each part may be
    lost twice."""
    with up(small_model, "recovery.max_restarts=2") as running:
        yield running


def assert_nothing_left(processes: list[psutil.Process], shm: set[str]) -> None:
    # Ray's agents tell the GCS that their raylet was lost; one that goes meanwhile costs the 60 s of such a call.
    _, alive = psutil.wait_procs(processes, timeout=75)
    assert not alive, f"left behind: {[' '.join(process.cmdline()) for process in alive]}"
    assert lasting_names() <= shm


def test_requests_at_the_command_line(running: Up, small_model: Path) -> None:
    options = ("--address", running.address, "--max-tokens", "6", "--temperature", "0")
    plain = run("generate", "The cache keeps", *options)
    assert plain.returncode == 0, plain.stderr
    assert plain.stdout.strip()
    assert run("generate", *options, text="The cache keeps").stdout == plain.stdout

    answer = json.loads(run("generate", "--token-ids", "5,6,7", "--json", *options).stdout)
    assert answer["token_ids"] == greedy(load_oracle(small_model), [5, 6, 7], 6)
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["timings"]["bytes_pushed"] > 0

    status = json.loads(run("status", "--address", running.address, "--json").stdout)
    assert json.dumps(status).count("free_pages") == 2
    assert status["http_address"] == running.http
    assert running.http in run("status", "--address", running.address).stdout
    same = chunks(running.http, COMPLETIONS, prompt=[5, 6, 7], max_tokens=6, temperature=0, return_token_ids=True)
    assert [token for part in same for token in part["choices"][0]["token_ids"]] == answer["token_ids"]

    wrong = run("generate", "--token-ids", "5,999999", "--address", running.address)
    assert wrong.returncode == 2
    assert "999999" in wrong.stderr
    assert len(wrong.stderr.splitlines()) == 1


@pytest.mark.long
def test_a_second_cluster_on_the_same_ray(running: Up, small_model: Path) -> None:
    """It asks for a token that only its user can read. Each cluster has its own end."""
    assert running.process.stderr is not None
    place = next(line for line in running.process.stderr if line.startswith("on the Ray at ")).split()[-1]
    assert ray_says_without_token(place) == grpc.StatusCode.UNAUTHENTICATED
    assert (Path.home() / ".ray" / "auth_token").stat().st_mode & 0o777 == 0o600
    prompt = ("generate", "--token-ids", "5,6,7", "--max-tokens", "6", "--temperature", "0", "--json", "--address")
    with up(small_model, address=place) as second:
        assert not [one for one in second.descendants if one.name() == "raylet"]
        answers = [json.loads(run(*prompt, each.address).stdout)["token_ids"] for each in (running, second)]
        assert answers == [greedy(load_oracle(small_model), [5, 6, 7], 6)] * 2
    assert second.process.returncode == 0
    assert json.loads(run(*prompt, running.address).stdout)["token_ids"] == answers[0]


def test_every_port_is_on_loopback(running: Up) -> None:
    processes = [psutil.Process(running.process.pid), *running.descendants]
    listening = {
        (process.name(), *found.laddr)
        for process in processes
        for found in process.net_connections(kind="inet")
        if found.status == psutil.CONN_LISTEN
    }
    assert {"gcs_server", "raylet"} <= {name for name, _, _ in listening}
    assert {address for _, address, _ in listening} == {"127.0.0.1", "::ffff:127.0.0.1"}


def ray_says_without_token(address: str) -> grpc.StatusCode:
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetAllNodeInfo")(b"", timeout=30)
    return refused.value.code()  # type: ignore[attr-defined]


def test_a_name_that_is_taken(running: Up, small_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, (error,) = refused(capsys, "--model", str(small_model), "--set", f"name={running.name}")
    assert code == 1
    assert running.name in error
    assert str(running.process.pid) in error


@pytest.mark.long
def test_what_dies_is_started_again_until_it_has_died_too_often(running: Up, small_model: Path) -> None:
    """This is the last test that uses the cluster."""
    with Client(running.address) as client:
        pids = [decode_worker(client)]
        pids += [one.pid for one in running.descendants if one.name().startswith("gateway.")]
        assert len(pids) == 2
        tokens = []
        for update in client.generate([5, 6, 7], max_tokens=200, timeout=200, **GREEDY):
            tokens += update.token_ids
            if len(pids) and len(tokens) > 3:
                os.kill(pids.pop(), signal.SIGKILL)
        assert tokens == greedy(load_oracle(small_model), [5, 6, 7], 200)
        after = client.cluster_info()
        assert (after.islands[0].epoch, after.islands[0].restarts, after.gateway_restarts) == (2, 1, 1)
        hosts = [one.pid for one in running.descendants if "ProcessHost" in " ".join(one.cmdline())]
        os.kill(
            process_host_of(decode_worker(client), hosts), signal.SIGKILL
        )  # what would start another in its place: the island is placed anew
        deadline = time.monotonic() + 120
        while (island := client.cluster_info().islands[0]).epoch != 3 or not island.workers:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        updates = client.generate([5, 6, 7], max_tokens=20, timeout=100, **GREEDY)
        assert [token for update in updates for token in update.token_ids] == tokens[:20]
        same = chunks(running.http, COMPLETIONS, prompt=[5, 6, 7], max_tokens=20, return_token_ids=True, **GREEDY)
        assert [token for part in same for token in part["choices"][0]["token_ids"]] == tokens[:20]
        started = running.descendants
        os.kill(decode_worker(client), signal.SIGKILL)
    _, error = running.process.communicate(timeout=60)
    assert running.process.returncode == 1
    assert "decode (PE 1) ended: its process was ended by SIGKILL" in error
    assert re.search(r"^\S+ \S+ island \S+ serves in epoch 2; seconds: ", error, re.MULTILINE)
    assert "Traceback" not in error
    assert_nothing_left(started, running.shm)


def decode_worker(client: Client) -> int:
    """Returns the decode worker's pid."""
    (island,) = client.cluster_info().islands
    (worker,) = [worker for worker in island.workers if worker.role == inference_pb2.ROLE_DECODE]
    assert worker.alive
    return worker.pid


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    """Makes the socket on which a service manager listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(30)
        yield listener


def test_down_leaves_nothing(small_model: Path, manager: socket.socket) -> None:
    """The service manager hears of the start, of what follows, and of the end."""
    told = {"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "600000"}
    with up(small_model, environ=told) as running:
        started = running.descendants
        assert len(started) > 3
        assert not any(told.keys() & process.environ().keys() for process in started)
        heard = [manager.recv(1024).decode()]
        while heard[-1] != "WATCHDOG=1":
            heard.append(manager.recv(1024).decode())
        *phases, ready, _ = heard
        assert len(phases) in (len(PHASES) - 1, len(PHASES))  # the first one is over; kernels may be compiled
        assert all(re.fullmatch(r"STATUS=\w.*", one) for one in phases)
        assert ready == f"READY=1\nSTATUS=serves at {running.address}"
        state = running_cluster(running.name)
        assert state is not None
        assert [phase for phase in state.start_seconds if phase != "builds"] == PHASES
        assert min(state.start_seconds.values()) > 0
        stopped = run("down", running.name)
        assert stopped.returncode == 0, stopped.stderr
        assert running.process.wait(timeout=10) == 0
        assert running.process.stderr is not None
        printed = re.findall(r"^(.+?) +(\d+\.\d\d) s$", running.process.stderr.read(), re.MULTILINE)
        assert [phase for phase, _ in printed if phase != "builds"] == [*PHASES, "in all"]
        while (said := manager.recv(1024)) == b"WATCHDOG=1":
            pass
        assert said == b"STOPPING=1\nSTATUS=stopping"
    assert_nothing_left(started, running.shm)


@pytest.fixture
def long_model(small_model: Path, tmp_path: Path) -> Path:
    """Makes the small model with room for streams of a minute."""
    folder = tmp_path / "long"
    shutil.copytree(small_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1 << 16}))
    return folder


def test_kill_minus_nine_leaves_nothing(long_model: Path) -> None:
    """Its clients hear at once why their streams end."""
    with up(long_model, "cache.num_pages=16384") as killed, Client(killed.address, resume_seconds=0) as client:
        started = killed.descendants
        streams = [client.generate([5, 6, 7], max_tokens=60000, timeout=60, **GREEDY) for _ in range(4)]
        assert all(next(updates).token_ids for updates in streams)
        killed.process.kill()
        for updates in streams:
            with pytest.raises(Unavailable, match="the cluster ends: its launcher or its Ray was lost"):
                list(updates)
        killed.process.wait(timeout=10)
    assert_nothing_left(started, killed.shm)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str]]:
    """Returns the exit code of an `up`, and the error lines on stderr."""
    with pytest.raises(SystemExit) as ended:
        main(["up", str(CONFIG), *arguments])
    lines = capsys.readouterr().err.splitlines()
    name = next(given.removeprefix("name=") for given in arguments if given.startswith("name="))
    return int(ended.value.code or 0), [line for line in lines if not line.startswith(f"tandem: {name}: ")]


def test_a_port_in_use(small_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, (error,) = refused(capsys, "--model", str(small_model), "--grpc-port", port, "--set", "name=taken")
    assert code == 1
    assert port in error
    assert "--grpc-port" in error


def _named_by_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"architectures": ["LamaForCausalLM"]}')
    (folder / "model.safetensors").touch()


def _half_written(folder: Path) -> None:
    make_checkpoint(folder)
    os.truncate(folder / "model.safetensors", 5000)


def _without_lfs(folder: Path) -> None:
    make_checkpoint(folder)
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


def _without_tokenizer(folder: Path) -> None:
    make_checkpoint(folder)
    (folder / "tokenizer.json").write_text("{")


def test_a_ray_that_does_not_start(
    small_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray raises Exception itself where its processes are too slow."""

    def init(**options: object) -> None:
        raise Exception("The current node timed out during startup.\nMore of it.")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr("tandem.cluster.processes.own_ray.PAUSE_SECONDS", 0.0)
    code, (error,) = refused(capsys, "--model", str(small_model), "--grpc-port", "0", "--set", "name=no-ray")
    assert code == 1
    assert error.startswith("tandem: a local Ray cannot be started, in 3 attempts: The current node timed out during")
    assert "load average" in error


def test_security_that_cannot_be(
    small_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RayProcesses, "start", None)  # nothing is started to find it out
    (tmp_path / "token").write_text("short")
    (tmp_path / "token").chmod(0o600)
    option = f"security.token_file={tmp_path / 'token'}"
    code, (error,) = refused(capsys, "--model", str(small_model), "--set", option, "--set", "name=no-token")
    assert code == 2
    assert "holds 5 characters" in error


@pytest.mark.parametrize(
    ("prepare", "named"),
    [
        (lambda folder: None, "config.json"),
        (_named_by_config, "LlamaForCausalLM"),
        (_half_written, "model.safetensors is cut short: 5000 bytes"),
        (_without_lfs, "model.safetensors is a Git LFS pointer, not the file; `git lfs pull` in "),
        (_without_tokenizer, "tokenizer.json is not a readable tokenizer"),
    ],
    ids=["empty", "unknown architecture", "half written", "a pointer", "broken tokenizer"],
)
def test_a_model_folder_that_cannot_be_served(
    prepare: Callable[[Path], object],
    named: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RayProcesses, "start", None)  # nothing is started to find it out
    prepare(tmp_path)
    code, (error, *_) = refused(capsys, "--model", str(tmp_path), "--set", "name=bad-model")
    assert code == 2
    assert error.startswith("tandem: model.path")
    assert named in error


@pytest.mark.parametrize(
    ("arch", "page_size", "named"),
    [
        ("llama", 128, "page_size is 128; on a GPU it must be one of 8, 16, 32, 64"),
        ("deepseek_v2", 16, "on a GPU it must be one of 512"),
    ],
)
def test_what_no_kernel_of_a_gpu_serves(
    arch: str,
    page_size: int,
    named: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RayProcesses, "start", None)  # nothing is started to find it out
    two = Driver("580.1", (Gpu("H200", 139 << 30, (9, 0)),) * 2)
    monkeypatch.setattr(preflight, "read_driver", lambda: two)
    monkeypatch.setattr(preflight, "find_spec", lambda package: package)
    make_checkpoint(tmp_path / "model", arch=arch, size="tiny", seed=3)
    settings = ["name=bad-sizes", "island.device=cuda", "island.transport=nvshmem", f"cache.page_size={page_size}"]
    options = [part for setting in (*settings, "model.dtype=bfloat16") for part in ("--set", setting)]
    code, (error,) = refused(capsys, "--model", str(tmp_path / "model"), *options)
    assert code == 2
    assert error.startswith("tandem: island.device is cuda, which model.path and cache.page_size do not fit: ")
    assert error.endswith(named)


@pytest.mark.parametrize("arch", ["llama", "deepseek_v4"])
def test_what_kernels_of_a_gpu_serve_is_not_refused(
    arch: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All checks come before Ray, which does not start here."""

    def start(processes: RayProcesses, cluster: str, num_cpus: int | None) -> None:
        raise StartFailed(f"no Ray for {cluster}")

    monkeypatch.setattr(RayProcesses, "start", start)
    monkeypatch.setattr(preflight, "read_driver", lambda: Driver("580.1", (Gpu("H200", 139 << 30, (9, 0)),) * 2))
    monkeypatch.setattr(preflight, "find_spec", lambda package: package)
    make_checkpoint(tmp_path / "model", arch=arch, size="tiny", seed=3)
    settings = ["name=fitting", "island.device=cuda", "island.transport=nvshmem", "model.dtype=bfloat16"]
    options = [part for setting in settings for part in ("--set", setting)]
    code, (error,) = refused(capsys, "--model", str(tmp_path / "model"), *options)
    assert code == 1
    assert error == "tandem: no Ray for fitting"
