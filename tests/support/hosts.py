"""Hosts made of this machine: network namespaces that a switch joins, with a Ray node in each."""

import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tandem.cache.kernels.build.build_once import KERNEL_CACHE, cache_folder
from tandem.cluster.processes.own_ray import LOOPBACK, SETTINGS

RAY_PORTS = range(20_000, 30_000)
NODE_CPUS = 2
STORE_BYTES = 80_000_000
COMMAND_SECONDS = 240  # on a machine that does other things, too
LISTENING, LOOPBACK_HEX = "0A", "0100007F"  # as /proc/net/tcp has them
START_ATTEMPTS = 3


def can_make_hosts() -> bool:
    """Returns whether this user may make network namespaces here."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"tandem-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "del", name], check=True)
    return made


class Hosts:
    """`count` hosts, 10.77.0.1 and so on. Owned by hosts()."""

    def __init__(self, count: int, home: Path, *, remembers: bool = False) -> None:
        """home: of the user on all hosts. A short path: sockets lie in it. remembers: Ray's GCS stores what it
        knows."""
        self.home = home
        self._stored = home / "gcs" if remembers else None
        self._gcs_command: list[str] = []
        self._gcs: subprocess.Popen[bytes] | None = None
        self._token = secrets.token_hex(16)
        self._prefix = f"tdm{os.getpid()}"
        self._switch = f"{self._prefix}-s"
        self._names = [f"{self._prefix}-{number}" for number in range(count)]
        self.addresses = [f"10.77.0.{number + 1}" for number in range(count)]
        # Ray looks at all processes of the machine, and starts no head where another one seems to have its address.
        self._ray_port = random.choice(RAY_PORTS)

    def build(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "br0", "up")
        for number, (name, address) in enumerate(zip(self._names, self.addresses, strict=True)):
            _run("ip", "netns", "add", name)
            cable = ["type", "veth", "peer", "name", f"port{number}", "netns", self._switch]
            _run("ip", "-n", name, "link", "add", "eth0", *cable)
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _run("ip", "-n", name, "link", "set", link, "up")
            _run("ip", "-n", self._switch, "link", "set", f"port{number}", "master", "br0", "up")

    def command(self, host: int, *command: str) -> list[str]:
        """Returns the command as it runs on that host."""
        return ["ip", "netns", "exec", self._names[host], *command]

    @property
    def environment(self) -> dict[str, str]:
        known = {name: value for name, value in os.environ.items() if name != LOOPBACK}  # a Ray of this process has it
        ray = SETTINGS | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self._token}
        if self._stored is not None:
            ray |= {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(self._stored)}
        # What this user has compiled before is not compiled again for each home.
        return known | ray | {"HOME": str(self.home), KERNEL_CACHE: str(cache_folder())}

    @property
    def ray(self) -> str:
        return f"{self.addresses[0]}:{self._ray_port}"

    def start_ray(self, host: int, cpus: int = NODE_CPUS, niceness: int = 0) -> None:
        """Starts a Ray node; the first host has the head. niceness: of the processes that Ray starts there."""
        if self._stored is not None:
            self._stored.mkdir(exist_ok=True)
        head = ["--head", f"--port={self._ray_port}", "--include-dashboard=false", f"--temp-dir={self.home / 'ray'}"]
        head += ["--no-monitor"]  # its autoscaler
        where = head if host == 0 else [f"--address={self.ray}"]
        options = [f"--node-ip-address={self.addresses[host]}", f"--num-cpus={cpus}"]
        store = f"--object-store-memory={STORE_BYTES}"
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start"]
        command = self.command(host, *ray, *where, *options, store, "--include-log-monitor=false")
        environment = self.environment | {"RAY_worker_niceness": str(niceness)}
        said = ""
        for _ in range(START_ATTEMPTS):
            try:
                done = subprocess.run(
                    command, env=environment, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
                )
            except subprocess.TimeoutExpired as error:
                said = str(error)
            else:
                if done.returncode == 0:
                    return
                said = done.stdout + done.stderr
            self.lose(host)  # on a busy machine Ray's processes are too slow for each other
        raise AssertionError(said)

    def end_gcs(self) -> None:
        """Kills the GCS of Ray's head."""
        (pid,) = (pid for pid in self.pids(0) if process_name(pid) == "gcs_server")
        self._gcs_command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
        os.kill(pid, signal.SIGKILL)
        self._reap()

    def start_gcs(self) -> None:
        """Starts the GCS again, with the command of Ray's head."""
        self._gcs = subprocess.Popen(
            self.command(0, *self._gcs_command),
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def _reap(self) -> None:
        if self._gcs is not None:
            self._gcs.wait(COMMAND_SECONDS)
            self._gcs = None

    def pids(self, host: int) -> list[int]:
        return _pids(self._names[host])

    def listening(self, host: int, names: tuple[str, ...]) -> list[str]:
        """Lists HOST:PORT of servers on that host's own address, or on all addresses, by the beginnings of their
        processes' names."""
        pids = [pid for pid in self.pids(host) if process_name(pid).startswith(names)]
        inodes = {inode for pid in pids for inode in _sockets(pid)}
        found: set[str] = set()
        for path in {f"/proc/{pid}/net/{table}" for pid in pids[:1] for table in ("tcp", "tcp6")}:
            for line in Path(path).read_text().splitlines()[1:]:
                fields = line.split()
                address, port = fields[1].split(":")
                if fields[3] == LISTENING and fields[9] in inodes and not address.endswith(LOOPBACK_HEX):
                    found.add(f"{self.addresses[host]}:{int(port, 16)}")
        return sorted(found)

    def lose(self, host: int) -> None:
        """Kills all processes of a host at once, as a power cut does."""
        for pid in self.pids(host):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def unplug(self, host: int, down: bool = True) -> None:
        _run("ip", "-n", self._switch, "link", "set", f"port{host}", "down" if down else "up")

    def destroy(self) -> None:
        for name in (*self._names, self._switch):
            deadline = time.monotonic() + 10
            while (pids := _pids(name)) and time.monotonic() < deadline:
                for pid in pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.05)
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        self._reap()


@contextmanager
def hosts(count: int, *, remembers: bool = False) -> Iterator[Hosts]:
    home = Path(tempfile.mkdtemp(prefix="tdm", dir="/tmp"))
    made = Hosts(count, home, remembers=remembers)
    try:
        made.build()
        yield made
    finally:
        made.destroy()
        shutil.rmtree(home, ignore_errors=True)


def process_name(pid: int) -> str:
    """Returns the name that the kernel keeps; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _sockets(pid: int) -> set[str]:
    """The inodes of those that the process has open."""
    found: set[str] = set()
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                kind, _, inode = os.readlink(entry).partition(":")
                if kind == "socket":
                    found.add(inode.strip("[]"))
    return found


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=COMMAND_SECONDS)


def _pids(name: str) -> list[int]:
    found: Sequence[str] = subprocess.run(
        ["ip", "netns", "pids", name], capture_output=True, text=True, check=False
    ).stdout.split()
    return [int(pid) for pid in found]
