"""A cluster that `tandem up` runs, with a Ray of its own: its processes by their part, and what it leaves behind."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tandem.cluster.cli.runtime_dir import running_cluster
from tandem.cluster.processes.process_tree import Process, children, descendants, runs, started_at
from tests.support.shm import lasting_names

CONFIG = Path(__file__).resolve().parents[2] / "deploy" / "local.yaml"
START_SECONDS = 400.0  # on a machine that does other things, too
END_SECONDS = 120.0
PARTS: dict[str, Callable[[str], bool]] = {
    "prefill": lambda name: name.startswith("prefill"),
    "decode": lambda name: name.startswith("decode"),
    "island": lambda name: name.startswith(("prefill", "decode")),
    "gateway": lambda name: name.startswith("gateway."),
    "process host": lambda name: name.startswith("ray::ProcessHos"),
    "raylet": lambda name: name == "raylet",
    "GCS": lambda name: name == "gcs_server",
    "fork server": lambda name: name == "fork server",
    "spare": lambda name: name == "spare fork serv",
}
"""The processes of a part, by their names in the kernel, which have at most 15 characters."""


class Launched:
    """One run of `tandem up`, which the constructor begins."""

    def __init__(self, model: Path, name: str, ports: Sequence[int], settings: tuple[str, ...]) -> None:
        """ports: of gRPC and of HTTP."""
        self.name = name
        self._ports = ports
        self._shm = lasting_names()
        command = [sys.executable, "-m", "tandem.cluster.cli", "up", str(CONFIG), "--model", str(model)]
        command += ["--grpc-port", str(ports[0]), "--http-port", str(ports[1])]
        for setting in (f"name={name}", *settings):
            command += ["--set", setting]
        self.log = model.parent / f"{name}.log"
        with self.log.open("a") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        self._seen: set[Process] = set()

    def ready(self) -> "Launched":
        """Returns when requests can come."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("ready "), f"{line!r}: {self.log.read_text()[-2000:]}"
        self._seen = self._now()
        return self

    def reach(self, part: str) -> None:
        """Returns once the start has made a process of that part, or its runtime file, which is its first step."""
        deadline = time.monotonic() + START_SECONDS
        while not (running_cluster(self.name) if part == "runtime file" else self.pids(part)):
            assert self.process.poll() is None, self.log.read_text()[-2000:]
            assert time.monotonic() < deadline, f"no {part} within {START_SECONDS} s"
            time.sleep(0.01)

    def pids(self, part: str) -> list[int]:
        """Returns the pids of a part that run now."""
        if part == "launcher":
            return [self.process.pid]
        now = self._now()
        self._seen |= now
        return sorted(pid for pid, _ in now if PARTS[part](_name(pid)))

    def wait(self) -> int:
        """Returns the exit code once the process has ended."""
        try:
            return self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            if self.process.stdout is not None:
                self.process.stdout.close()

    def interrupt(self, part: str, seconds: float) -> None:
        """Ends the start by SIGTERM, `seconds` after it has reached a part. It says so, and nothing is left."""
        self.reach(part)
        time.sleep(seconds)
        assert self.stop() == 0, self.log.read_text()[-2000:]
        assert "tandem: SIGTERM: stopping" in self.log.read_text().splitlines()
        self.check_gone()

    def stop(self) -> int:
        """Sends SIGTERM, and returns the exit code."""
        self._seen |= self._now()
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def check_gone(self) -> None:
        """Raises AssertionError for a process, a name in /dev/shm, a listening port or a runtime file that is left."""
        deadline = time.monotonic() + END_SECONDS
        while left := self._left():
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.05)
        lasting = lasting_names() - self._shm
        assert not lasting, f"left in /dev/shm, or somebody else's: {sorted(lasting)}"
        assert running_cluster(self.name) is None
        for port in self._ports:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))

    def _left(self) -> list[str]:
        """Names processes that still run: seen ones, and those that they have started since."""
        below = {process for parent in list(self._seen) if runs(parent) for process in children(parent[0])}
        self._seen |= below | titled(self.name)
        return [f"{process[0]} {_name(process[0])}" for process in self._seen if _runs_on(process)]

    def _now(self) -> set[Process]:
        """Returns the processes that run now. A dead fork server's children are nobody's descendants, so their titles
        tell them."""
        return descendants(self.process.pid) | titled(self.name)


def titled(cluster: str) -> set[Process]:
    """Returns the processes whose title has that cluster's name, except its launcher."""
    return {
        (int(entry), started_at(int(entry)))
        for entry in os.listdir("/proc")
        if entry.isdecimal() and (title := _title(entry)).startswith(f"tandem: {cluster}/")
        if not title.startswith(f"tandem: {cluster}/launcher")
    }


def _title(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _runs_on(process: Process) -> bool:
    """Returns whether it runs, and does not just wait to be reaped."""
    return runs(process) and os.path.exists(f"/proc/{process[0]}/fd/0")
