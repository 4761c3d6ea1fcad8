"""A storm over a cluster of three hosts, which are network namespaces of this machine, with clients on a fourth.

Processes and whole hosts are killed, and Ray's head loses its GCS for a while. Links are down for less and for more
than `recovery.partition_seconds`. Each host has a gateway. With an odd seed each island has its workers on two hosts,
over TCP or NIXL; with an even one on one.
"""

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.chaos.clients_on_a_host import HostClients
from tests.e2e.host_cluster import OVER_HOSTS, TOKEN, Cluster, running
from tests.support.client_requests import GREEDY
from tests.support.hosts import Hosts, hosts
from tests.support.oracle import greedy_all, load_oracle, random_prompt

OUTPUT = 48
VOCABULARY = 512
PARTITION_SECONDS = 4.0
LONG_SECONDS = 60.0
PATIENCE_SECONDS = 180.0
CLIENTS = 3  # the host of theirs
LOG_CHARACTERS = 8000
SETTINGS: dict[str, Any] = {
    "num_islands": 2,
    "island.verify_kv": "true",
    "cache.page_size": 8,
    "scheduler.max_batch_tokens": 32,
    "gateway.nodes": "all",
    "gateway.port": 50071,
    "gateway.processes": 2,
    "gateway.max_attempts": 100,
    "gateway.queue_seconds": 300,
    "recovery.partition_seconds": PARTITION_SECONDS,
    "recovery.max_restarts": 100_000,
    "recovery.drain_seconds": 1,
}
PARTS = {"worker": ("prefill (PE", "decode (PE"), "gateway": ("gateway.",), "process host": ("ray::ProcessHos",)}
"""The processes of a part, by the beginnings of their names in the kernel."""
BLOWS = {"kill worker": 6, "kill gateway": 3, "kill process host": 2, "kill host": 2, "lose GCS": 3}
BLOWS |= {"short partition": 6, "partition": 3, "long partition": 1, "short partition of the head": 1}


@dataclass
class HostOutcome:
    """The outcome. blows: what was done. pauses: the longest of a stream after each kind of blow, in seconds. rays:
    nodes of Ray that were started again."""

    blows: Counter[str] = field(default_factory=Counter)
    streams: Counter[str] = field(default_factory=Counter)
    attempts: Counter[int] = field(default_factory=Counter)
    pauses: dict[str, float] = field(default_factory=dict)
    rays: int = 0
    epochs: int = 0
    seconds: float = 0.0


def plan_host_blows(seed: int, number: int) -> list[str]:
    """Draws the blows in their order. Their targets are drawn when they fall."""
    return random.Random(seed).choices(list(BLOWS), list(BLOWS.values()), k=number)


class HostStorm:
    """Owns the hosts, the cluster and the clients while run() runs."""

    def __init__(
        self,
        model: Path,
        seed: int,
        folder: Path,
        transport: str | None = None,
        settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """transport: of all islands; None is TCP where islands have several hosts, else the configuration's. settings:
        more of its keys."""
        self._model = model
        self._settings = {**settings, **({} if transport is None else {"island.transport": transport})}
        self._seed = seed
        self._random = random.Random(f"{seed} targets")
        self._folder = folder
        self.outcome = HostOutcome()

    def run(self, blows: Sequence[str]) -> HostOutcome:
        """Runs until all blows have fallen. AssertionError for a wrong token, a page or process that is left, or an end
        without a type. It has the last lines of the launcher's log."""
        try:
            return self._run(blows)
        except BaseException:
            with suppress(FileNotFoundError):  # it had not begun
                print((self._folder / "log").read_text()[-LOG_CHARACTERS:], file=sys.stderr)
            raise

    def _run(self, blows: Sequence[str]) -> HostOutcome:
        began = time.monotonic()
        settings = SETTINGS | (OVER_HOSTS if self._seed % 2 else {}) | self._settings
        with hosts(CLIENTS + 1, remembers=True) as made:
            for host in range(CLIENTS):
                made.start_ray(host)
            with running(made, self._folder, self._model, settings) as cluster:
                cases = self._cases(cluster)
                program = [
                    sys.executable,
                    "-m",
                    "tests.chaos.clients_on_a_host",
                    ",".join(cluster.addresses),
                    str(cluster.ca),
                ]
                environment = made.environment | {"TOKEN": TOKEN}
                command = made.command(CLIENTS, *program)
                with HostClients(command, environment, cases, self._folder, self._seed) as clients:
                    self._strike(blows, cluster, clients)
                    clients.stop()
                self._report(clients, began)
                self._check_pages(cluster)
            left = [pid for host in range(CLIENTS) for part in PARTS for pid in _pids(made, host, part)]
            assert not left, f"left behind: {left}"
        return self.outcome

    def _cases(self, cluster: Cluster) -> list[Any]:
        """Makes the cases. Greedy ones have the tokens of transformers; those with a seed have the cluster's
        undisturbed answers."""
        prompts = [random_prompt(self._random.randrange(1, 90), number, VOCABULARY) for number in range(8)]
        greedily: dict[str, Any] = GREEDY | {"max_tokens": OUTPUT}
        drawn = greedily | {"temperature": 1.0, "top_p": 0.9, "seed": 11}
        expected = greedy_all(load_oracle(self._model), prompts, OUTPUT)
        answers = cluster.answers(self._folder, prompts, drawn)
        return [
            [prompt, sampling, tokens]
            for sampling, known in ((greedily, expected), (drawn, answers))
            for prompt, tokens in zip(prompts, known, strict=True)
        ]

    def _strike(self, blows: Sequence[str], cluster: Cluster, clients: HostClients) -> None:
        self._await_streams(clients, 16)
        for number, blow in enumerate(blows):
            clients.longest_pause = 0.0
            self._hit(blow, cluster, clients)
            self.outcome.blows[blow] += 1
            self._await_streams(clients, 12)
            self.outcome.pauses[blow] = max(self.outcome.pauses.get(blow, 0.0), clients.longest_pause)
            assert not clients.wrong, clients.wrong
            if number % 5 == 4:
                print(json.dumps({"blows": number + 1, "streams": clients.outcomes}), file=sys.stderr, flush=True)
            time.sleep(self._random.uniform(0.0, 2.0))

    def _await_streams(self, clients: HostClients, number: int) -> None:
        """Waits until so many more streams have finished: more than can have been under way."""
        enough, deadline = clients.finished + number, time.monotonic() + PATIENCE_SECONDS
        while clients.finished < enough:
            assert time.monotonic() < deadline, f"no streams for {PATIENCE_SECONDS:g} s: {clients.outcomes}"
            time.sleep(0.02)

    def _hit(self, blow: str, cluster: Cluster, clients: HostClients) -> None:
        made, far = cluster.hosts, self._random.choice((1, 2))
        kind, _, part = blow.partition(" ")
        if part in PARTS:
            with suppress(ProcessLookupError):  # it has just ended by itself
                os.kill(self._random.choice(self._await_part(made, part)), signal.SIGKILL)
        elif blow == "lose GCS":
            made.end_gcs()
            time.sleep(self._random.uniform(0.0, 20.0))
            made.start_gcs()
        elif blow == "kill host":
            made.lose(far)
            time.sleep(self._random.uniform(0.0, 20.0))
            self._start_ray(made, far)
        elif kind == "short":
            self._cut(made, 0 if part.endswith("head") else far, PARTITION_SECONDS / 2)
        else:
            self._cut(made, far, LONG_SECONDS if kind == "long" else 0.0, until_quiet=True)
            self._revive(made, far)

    def _cut(self, made: Hosts, host: int, seconds: float, *, until_quiet: bool = False) -> None:
        """Cuts the link. until_quiet: at least until the workers there have ended, which they do before the link is
        back."""
        made.unplug(host)
        try:
            time.sleep(seconds)
            deadline = time.monotonic() + PATIENCE_SECONDS
            while until_quiet and (left := _pids(made, host, "worker")):
                assert time.monotonic() < deadline, f"workers that are cut off do not end: {left}"
                time.sleep(0.05)
        finally:
            made.unplug(host, down=False)

    def _revive(self, made: Hosts, host: int) -> None:
        """Starts a node again. A node that Ray has given up ends once it hears so, and a service would restart it."""
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline:
            if not _raylet(made, host):
                self._start_ray(made, host)
                return
            time.sleep(0.1)

    def _start_ray(self, made: Hosts, host: int) -> None:
        made.lose(host)  # what Ray has left there
        made.start_ray(host)
        self.outcome.rays += 1

    def _await_part(self, made: Hosts, part: str) -> list[int]:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (pids := [pid for host in range(CLIENTS) for pid in _pids(made, host, part)]):
            assert time.monotonic() < deadline, f"no {part} was started again"
            for host in (1, 2):
                if not _raylet(made, host):  # it has heard late that Ray had given it up
                    self._start_ray(made, host)
            time.sleep(0.05)
        return pids

    def _report(self, clients: HostClients, began: float) -> None:
        self.outcome.streams, self.outcome.attempts = clients.outcomes, clients.attempts
        self.outcome.seconds = round(time.monotonic() - began, 1)
        assert not clients.wrong, clients.wrong
        typed = ("finished", "ended: Unavailable", "refused: Unavailable", "refused: Overloaded", "ended: Superseded")
        untyped = [outcome for outcome in clients.outcomes if not outcome.startswith(typed)]
        assert not untyped, untyped

    def _check_pages(self, cluster: Cluster) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            islands = cluster.info()["islands"]
            self.outcome.epochs = sum(int(island["epoch"]) for island in islands)
            leaks = [
                f"{island['name']} {worker}"
                for island in islands
                for worker in island["workers"] or [None]
                if worker is None or not _is_idle(worker)
            ]
            if not leaks:
                return
            assert time.monotonic() < deadline, leaks
            time.sleep(0.5)


def _is_idle(worker: dict[str, Any]) -> bool:
    """Returns whether nothing runs, and every page is free or holds a prefix only."""

    def count(name: str) -> int:
        return int(worker.get(name, 0))

    busy = sum(map(count, ("running", "waiting", "draining_pages")))
    return not busy and count("num_pages") == count("free_pages")


def _pids(made: Hosts, host: int, part: str) -> list[int]:
    return [pid for pid in made.pids(host) if _name(pid).startswith(PARTS[part])]


def _raylet(made: Hosts, host: int) -> bool:
    return any(_name(pid) == "raylet" for pid in made.pids(host))


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
