"""vLLM's own servers, one for each GPU, as one would run them behind a round-robin proxy."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tandem.cluster.errors import BenchmarkFailed
from tests.support.free_ports import free_ports

READY_SECONDS = 300.0
END_SECONDS = 20.0
LOOK_SECONDS = 0.5
SHIPPED = "shipped"
LOCAL = "http://127.0.0.1"
SETTINGS = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}


@contextmanager
def running_vllm(
    site: Path, model: Path, variant: str, gpus: int, logs: Path, flags: Sequence[str] = ()
) -> Iterator[list[str]]:
    """URLs of servers that are ready, until the context ends.

    site: the folder of packages with vLLM. variant: most tokens of a step, or SHIPPED. logs: folder of what they write.
    flags: further flags of the servers; where they contradict the usual ones, they win.
    Raises BenchmarkFailed when one ends or is not ready within READY_SECONDS.
    """
    visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))).split(",")
    servers: list[subprocess.Popen[bytes]] = []
    try:
        ports = free_ports(len(visible[:gpus]))
        for number, (gpu, port) in enumerate(zip(visible, ports, strict=False)):
            servers.append(
                _start(site, [*_command_of(model, variant, port), *flags], gpu, logs / f"vllm-{variant}-{number}.log")
            )
        urls = [f"{LOCAL}:{port}" for port in ports]
        _wait(servers, urls, logs)
        yield urls
    finally:
        _end(servers)


def _command_of(model: Path, variant: str, port: int) -> list[str]:
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--load-format", "dummy", "--port", str(port), "--no-enable-prefix-caching"]
    return command if variant == SHIPPED else [*command, "--max-num-batched-tokens", variant]


def _start(site: Path, command: Sequence[str], gpu: str, log: Path) -> "subprocess.Popen[bytes]":
    environment = os.environ | SETTINGS | {"CUDA_VISIBLE_DEVICES": gpu, "PYTHONPATH": str(site)}
    with log.open("wb") as file:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=log.parent,  # whose folder is on no import path of ours
            start_new_session=True,  # its engine processes end with it
        )


def _wait(servers: "Sequence[subprocess.Popen[bytes]]", urls: Sequence[str], logs: Path) -> None:
    until = time.monotonic() + READY_SECONDS
    for server, url in zip(servers, urls, strict=True):
        while not _is_ready(url):
            if server.poll() is not None:
                raise BenchmarkFailed(f"vLLM for {url} ended with exit code {server.returncode}; its log is in {logs}")
            if time.monotonic() > until:
                raise BenchmarkFailed(f"vLLM for {url} was not ready within {READY_SECONDS:g} s; its log is in {logs}")
            time.sleep(LOOK_SECONDS)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=LOOK_SECONDS) as answer:
            return answer.status == 200
    except OSError:
        return False


def _end(servers: "Sequence[subprocess.Popen[bytes]]") -> None:
    """The process groups that _start made, politely first."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for server in servers:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, number)
        until = time.monotonic() + END_SECONDS
        for server in servers:
            with suppress(subprocess.TimeoutExpired):
                server.wait(max(0.0, until - time.monotonic()))
