"""`tandem up` and the commands beside it, as a person types them: each a process."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tandem.cluster.client import Client
from tandem.cluster.runtime_dir import running_cluster
from tandem.proto import inference_pb2
from tests.oracle import greedy, load_oracle
from tests.requests import GREEDY

CONFIG = Path(__file__).resolve().parents[2] / "deploy" / "local.yaml"
PHASES = ["command, imports", "ray", "processes, imports", "weights", "island", "kernels", "gateway"]
TANDEM = [sys.executable, "-m", "tandem.cluster.cli"]


def run(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*TANDEM, *arguments], input=text, capture_output=True, text=True, timeout=90, check=False)


@contextmanager
def up(model: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process of a cluster of its own name, and its address once it is ready."""
    name = f"up-{os.getpid()}"
    command = [*TANDEM, "up", str(CONFIG), "--model", str(model), "--grpc-port", "0"]
    options = [f"name={name}", "cache.num_pages=64", "ray.num_cpus=2", *arguments]
    for option in options:
        command += ["--set", option]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"ready grpc=(\S+:\d+)\n", line)
        assert found, f"no ready line but {line!r}; stderr: {process.communicate(timeout=60)[1]}"
        yield process, found[1]
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def assert_nothing_left(processes: list[psutil.Process], shm: set[str]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=15)
    assert not alive, f"left behind: {[' '.join(process.cmdline()) for process in alive]}"
    assert set(os.listdir("/dev/shm")) <= shm


@pytest.mark.timeout(240)
def test_a_session_at_the_command_line(small_model: Path) -> None:
    shm = set(os.listdir("/dev/shm"))
    with up(small_model) as (process, address):
        started = descendants(process)
        assert len(started) > 3
        name = f"up-{os.getpid()}"

        plain = run("generate", "The cache keeps", "--address", address, "--max-tokens", "6", "--temperature", "0")
        assert plain.returncode == 0, plain.stderr
        assert plain.stdout.strip()
        piped = run("generate", "--address", address, "--max-tokens", "6", "--temperature", "0", text="The cache keeps")
        assert piped.stdout == plain.stdout

        ids = run(
            "generate",
            "--token-ids",
            "5,6,7",
            "--json",
            "--address",
            address,
            "--max-tokens",
            "6",
            "--temperature",
            "0",
        )
        answer = json.loads(ids.stdout)
        assert answer["token_ids"] == greedy(load_oracle(small_model), [5, 6, 7], 6)
        assert answer["usage"]["prompt_tokens"] == 3
        assert answer["timings"]["bytes_pushed"] > 0

        status = json.loads(run("status", "--address", address, "--json").stdout)
        assert json.dumps(status).count("free_pages") == 2

        wrong = run("generate", "--token-ids", "5,999999", "--address", address)
        assert wrong.returncode == 2
        assert "999999" in wrong.stderr
        assert len(wrong.stderr.splitlines()) == 1

        second = run("up", str(CONFIG), "--model", str(small_model), "--set", f"name={name}")
        assert second.returncode == 1
        assert name in second.stderr
        assert str(process.pid) in second.stderr
        assert "Traceback" not in second.stderr

        state = running_cluster(name)
        assert state is not None
        assert list(state.start_seconds) == PHASES
        assert min(state.start_seconds.values()) > 0

        stopped = run("down", name)
        assert stopped.returncode == 0, stopped.stderr
        assert process.wait(timeout=10) == 0
        assert process.stderr is not None
        printed = re.findall(r"^(.+?) +(\d+\.\d\d) s$", process.stderr.read(), re.MULTILINE)
        assert [phase for phase, _ in printed] == [*PHASES, "in all"]
    assert_nothing_left(started, shm)


@pytest.mark.timeout(240)
def test_a_worker_that_dies_ends_the_cluster_with_an_error(small_model: Path) -> None:
    shm = set(os.listdir("/dev/shm"))
    with up(small_model, "recovery.max_restarts=0") as (process, address):
        started = descendants(process)
        workers = json.loads(run("status", "--address", address, "--json").stdout)
        pids = [int(pid) for pid in re.findall(r'"pid": (\d+)', json.dumps(workers))]
        os.kill(pids[1], signal.SIGKILL)
        _, error = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "decode (PE 1)" in error
        assert "Traceback" not in error
    assert_nothing_left(started, shm)


@pytest.mark.timeout(240)
def test_what_dies_is_started_again_and_streams_go_on(small_model: Path) -> None:
    shm = set(os.listdir("/dev/shm"))
    with up(small_model) as (process, address), Client(address) as client:
        (island,) = client.cluster_info().islands
        pids = [worker.pid for worker in island.workers if worker.role == inference_pb2.ROLE_DECODE]
        pids += [one.pid for one in descendants(process) if one.name().startswith("gateway.")]
        assert len(pids) == 2
        tokens = []
        for update in client.generate([5, 6, 7], max_tokens=200, timeout=200, **GREEDY):
            tokens += update.token_ids
            if len(pids) and len(tokens) > 3:
                os.kill(pids.pop(), signal.SIGKILL)
        assert tokens == greedy(load_oracle(small_model), [5, 6, 7], 200)
        after = client.cluster_info()
        assert (after.islands[0].epoch, after.islands[0].restarts, after.gateway_restarts) == (2, 1, 1)
        place = psutil.Process(after.islands[0].workers[0].pid).parents()[1]
        assert "Place" in " ".join(place.cmdline())
        place.kill()  # what would start another in its place: the island is placed anew
        deadline = time.monotonic() + 120
        while (island := client.cluster_info().islands[0]).epoch != 3 or not island.workers:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        updates = client.generate([5, 6, 7], max_tokens=20, timeout=100, **GREEDY)
        assert [token for update in updates for token in update.token_ids] == tokens[:20]
        started = descendants(process)
    assert_nothing_left(started, shm)


def test_kill_minus_nine_leaves_nothing(small_model: Path) -> None:
    shm = set(os.listdir("/dev/shm"))
    with up(small_model) as (process, _):
        started = [one for one in descendants(process) if not one.name().endswith("Agent")]
        process.kill()
        process.wait(timeout=10)
    # Ray's own agents notice only after a while; what holds pages ends at once.
    assert_nothing_left(started, shm)


def test_a_port_in_use(small_model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        began = time.monotonic()
        result = run("up", str(CONFIG), "--model", str(small_model), "--grpc-port", str(port), "--set", "name=taken")
    assert time.monotonic() - began < 30
    assert result.returncode == 1
    assert str(port) in result.stderr
    assert "--grpc-port" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("prepare", "named"),
    [
        (lambda folder: None, "config.json"),
        (
            lambda folder: (folder / "config.json").write_text('{"architectures": ["LamaForCausalLM"]}'),
            "LlamaForCausalLM",
        ),
    ],
    ids=["empty", "unknown architecture"],
)
def test_a_model_folder_that_cannot_be_served(prepare, named: str, tmp_path: Path) -> None:  # noqa: ANN001
    prepare(tmp_path)
    result = run("up", str(CONFIG), "--model", str(tmp_path), "--set", "name=bad-model")
    assert result.returncode == 2
    assert named in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_model_folder_without_weights(small_model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((small_model / "config.json").read_bytes())
    result = run("up", str(CONFIG), "--model", str(tmp_path), "--grpc-port", "0", "--set", "name=no-weights")
    assert result.returncode == 1
    assert "model.safetensors" in result.stderr
    assert len(result.stderr.splitlines()) == 1
