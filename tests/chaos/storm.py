"""A storm over a cluster: processes are killed, stopped and hung and control messages come late, twice or never, while
clients ask; and nothing may be lost.

The order of what happens, and after how many messages to clients, follows from the seed.
"""

import asyncio
import os
import random
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx

from tandem.cluster.client import AsyncClient, Client
from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.errors import CallError
from tandem.cluster.supervision.launcher import Cluster
from tandem.proto import inference_pb2
from tests.chaos.attacker import Attacker
from tests.chaos.bad_network import BadlyConnectedOnGpus, BadlyConnectedProcesses, BadNetwork
from tests.chaos.cases import Case, make_cases
from tests.chaos.http_stream import HttpStream
from tests.support.local_processes import started_at

OUTPUT_TOKENS, LONG_OUTPUT_TOKENS = 40, 160  # long: with adaptive roles, so that requests live to be moved
UNRESPONSIVE_SECONDS = 5.0
# Longest wait for messages to clients before the next blow: a start takes longer on GPUs.
QUIET_SECONDS, QUIET_SECONDS_ON_GPUS = 0.5, 2.5

CONFIG: dict[str, Any] = {
    "num_islands": 2,
    "island.threads_per_worker": 1,
    "island.num_signals": 16,
    "island.lease_seconds": 0.05,
    "island.verify_kv": True,
    "cache.page_size": 8,
    "cache.num_pages": 96,
    "scheduler.max_batch_tokens": 32,
    "gateway.processes": 3,
    "gateway.port": 0,
    "gateway.http_port": 0,
    "gateway.max_attempts": 100,
    "recovery.max_restarts": 100_000,
    "recovery.drain_seconds": 1.0,
    "recovery.unresponsive_seconds": UNRESPONSIVE_SECONDS,
}
ROLES: dict[str, dict[str, Any]] = {
    "split": {},
    "adaptive": {
        "scheduler.roles": "adaptive",
        "scheduler.token_seconds": 0.0005,  # so little that no worker seems fast enough for all
        "cache.num_pages": 192,
    },
    "colocated": {"scheduler.roles": "colocated", "island.num_prefill": 0},
}
"""The roles of workers. With colocated an island is one worker."""
RANKS: dict[str, Any] = {
    "num_islands": 1,
    "island.prefill_ranks": 2,
    "island.decode_ranks": 2,
}
"""Both workers of one island have two ranks."""
WORKERS: dict[str, Any] = {"num_islands": 1, "island.num_prefill": 2, "island.num_decode": 2}
"""One island has all workers."""
ON_GPUS: dict[str, Any] = {
    "island.device": "cuda",
    "island.transport": "nvshmem",
    "model.dtype": "float32",  # its tokens do not depend on who shares a step
    "recovery.unresponsive_seconds": 2 * UNRESPONSIVE_SECONDS,
}


@dataclass(frozen=True)
class Blow:
    """One thing that happens, once clients got `messages` more messages. how: kill, stop (for a while), hang."""

    messages: int
    target: str
    how: str
    seconds: float


@dataclass
class Outcome:
    """The counts of clients' requests and of blows to the cluster.

    silences: median and worst of the longest time that each finished request was without a message, in seconds; apart
    for requests that one gateway has placed more than once.
    """

    finished: int = 0
    finished_over_http: int = 0
    disconnected: int = 0
    broken: int = 0  # over HTTP, begun streams, by the end of a gateway
    placed_again: int = 0
    moves: int = 0
    accepted: int = 0  # drafted tokens, of finished requests that came over gRPC
    blows: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    attacks: Counter[str] = field(default_factory=Counter)  # rounds of each, and what they heard
    refused: int = 0  # over HTTP, for now
    errors: Counter[str] = field(default_factory=Counter)
    restarts: dict[str, int] = field(default_factory=dict)
    silences: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


def plan_blows(seed: int, number: int, targets: Sequence[str]) -> list[Blow]:
    rng = random.Random(seed)
    return [
        Blow(
            messages=rng.randrange(0, 60),
            target=rng.choice(targets),
            how=rng.choices(("kill", "stop", "hang"), (8, 3, 1))[0],
            seconds=rng.uniform(0.05, 1.0),
        )
        for _ in range(number)
    ]


class Storm:
    """Two islands, three gateway processes, and what happens to them. Each client has its own connection, so that the
    gateway processes share them."""

    def __init__(
        self,
        model: Path,
        log: Path,
        seed: int,
        num_clients: int = 8,
        *,
        gpus: bool = False,
        roles: str = "split",
        attacked: bool = False,
        settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """log: a new file, for what happens to messages. gpus: workers share this host's. roles: of ROLES. attacked:
        somebody attacks the gateway's ports meanwhile. settings: dotted keys of the cluster's configuration, as of
        speculation."""
        self._model = model
        self._gpus = gpus
        self._attacked = attacked
        self._seed = seed
        self._num_clients = num_clients
        self._output_tokens = LONG_OUTPUT_TOKENS if roles == "adaptive" else OUTPUT_TOKENS
        self.outcome = Outcome()
        self._network = BadNetwork(seed, log)
        self.processes = (BadlyConnectedOnGpus if gpus else BadlyConnectedProcesses)(self._network)
        overrides = {"model.path": str(model), **CONFIG, **(ON_GPUS if gpus else {}), **ROLES[roles]}
        overrides |= settings
        config = load_config(None, overrides)
        self.cluster = Cluster(config, self.processes)
        self._num_islands, self._ranks = config.num_islands, config.island.ranks
        self._own_segments = int(config.island.transport == "shared_memory")  # of a worker
        self._targets = ("prefill", "decode", "gateway") if config.island.num_prefill else ("decode", "gateway")
        self._received = 0
        self._silences: dict[str, list[float]] = {"placed once": [], "placed again": []}
        self._connected, self._over = threading.Event(), threading.Event()

    def run(self, num_blows: int, num_requests: int) -> Outcome:
        """Runs until all blows have fallen and at least num_requests were made. Then the cluster is idle and whole."""
        began = time.monotonic()
        cases = make_cases(self._model, self._output_tokens, self._seed)
        address = self.cluster.start()
        try:
            blows = threading.Thread(
                target=self._strike, args=(plan_blows(self._seed, num_blows, self._targets),), name="blows"
            )
            attacker = Attacker(address, self.cluster.http_address or "")
            with attacker if self._attacked else nullcontext():
                blows.start()
                try:
                    asyncio.run(self._clients(address, cases, num_requests))
                finally:
                    self._over.set()
                    self._connected.set()
                    blows.join()
            self.outcome.attacks = attacker.answers
            self._check_calm(address)
        finally:
            self.cluster.stop()
        self._check_gone()
        self.outcome.faults = self._network.faults()
        assert not self.outcome.faults["corrupt"]
        for kind, seconds in self._silences.items():
            self.outcome.silences[f"{kind}, median"] = round(statistics.median(seconds or [0.0]), 3)
            self.outcome.silences[f"{kind}, worst"] = round(max(seconds, default=0.0), 3)
        self.outcome.seconds = time.monotonic() - began
        return self.outcome

    # Clients

    async def _clients(self, address: str, cases: Sequence[Case], num_requests: int) -> None:
        async def one(client: AsyncClient, number: int) -> None:
            rng = random.Random(f"{self._seed} {number}")
            while not self._over.is_set() or self._made < num_requests:
                await self._request(
                    client, rng.choice(cases), rng.randrange(self._output_tokens) if rng.random() < 0.2 else None
                )

        async def one_over_http(client: httpx.AsyncClient) -> None:
            rng = random.Random(f"{self._seed} http")
            while not self._over.is_set() or not self.outcome.finished_over_http:
                case = rng.choice(cases)
                await self._request_over_http(
                    client, case, rng.randrange(self._output_tokens) if rng.random() < 0.2 else None
                )

        http_url = f"http://{self.cluster.http_address}"
        async with (
            AsyncExitStack() as stack,
            httpx.AsyncClient(base_url=http_url, timeout=120, trust_env=False) as http,
        ):
            clients = [await stack.enter_async_context(AsyncClient(address)) for _ in range(self._num_clients)]
            for client in clients:
                await client.cluster_info()
            self._connected.set()
            await asyncio.gather(*(one(client, number) for number, client in enumerate(clients)), one_over_http(http))

    @property
    def _made(self) -> int:
        return self.outcome.finished + self.outcome.disconnected + self.outcome.errors.total()

    async def _request(self, client: AsyncClient, case: Case, leave_after: int | None) -> None:
        """One request; the client goes away after leave_after tokens if that is not None."""
        tokens: list[int] = []
        text, num_logprobs, last = "", 0, None
        heard, silence = time.monotonic(), 0.0
        stream = client.generate(case.prompt, timeout=120, **case.sampling)
        try:
            async for update in stream:
                self._received += 1
                heard, silence = time.monotonic(), max(silence, time.monotonic() - heard)
                tokens += update.token_ids
                text += update.text
                num_logprobs += len(update.logprobs)
                last = update
                if leave_after is not None and len(tokens) > leave_after:
                    break
        except CallError as error:
            self.outcome.errors[f"{type(error).__name__}: {error}"] += 1
        finally:
            await stream.aclose()
        assert tokens == case.tokens[: len(tokens)], f"{tokens} is not the beginning of {case.tokens}"
        if "logprobs" in case.sampling:
            assert num_logprobs == len(tokens)
        if last is None or last.usage is None:
            self.outcome.disconnected += leave_after is not None
            return
        assert tokens == case.tokens, f"{tokens} ended before {case.tokens}"
        assert case.text.startswith(text) if "stop" in case.sampling else text == case.text
        assert (last.usage.prompt_tokens, last.usage.output_tokens) == (case.prompt_tokens, len(tokens))
        assert last.timings is not None
        again = last.timings.attempts > 1
        self._silences["placed again" if again else "placed once"].append(silence)
        self.outcome.placed_again += again
        self.outcome.moves += last.timings.moves
        self.outcome.accepted += last.usage.accepted_tokens
        self.outcome.finished += 1

    async def _request_over_http(self, client: httpx.AsyncClient, case: Case, leave_after: int | None) -> None:
        stream = HttpStream()
        body = {"prompt": case.prompt, "return_token_ids": True, **case.sampling}
        await stream.receive(client, body, leave_after)
        assert stream.tokens == case.tokens[: len(stream.tokens)], (
            f"{stream.tokens}: not the beginning of {case.tokens}"
        )
        if stream.retry_after_seconds is not None:
            self.outcome.refused += 1
            await asyncio.sleep(stream.retry_after_seconds)
        elif stream.error:
            self.outcome.errors[stream.error] += 1
        elif stream.broken:
            self.outcome.broken += stream.begun
            await asyncio.sleep(0.05)  # perhaps nobody listens yet
        elif stream.ended:
            assert stream.tokens == case.tokens, f"{stream.tokens} ended before {case.tokens}"
            assert case.text.startswith(stream.text) if "stop" in case.sampling else stream.text == case.text
            self.outcome.finished_over_http += 1
        else:
            assert leave_after is not None, f"{stream.tokens} ended without a word"

    # Blows

    def _strike(self, blows: Sequence[Blow]) -> None:
        rng, quiet_seconds = random.Random(self._seed), QUIET_SECONDS_ON_GPUS if self._gpus else QUIET_SECONDS
        self._connected.wait()  # cluster_info() is not tried again
        try:
            for blow in blows:
                until, deadline = self._received + blow.messages, time.monotonic() + quiet_seconds
                while self._received < until and time.monotonic() < deadline and not self._over.is_set():
                    time.sleep(0.002)
                if self._over.is_set():
                    return
                self._hit(blow, rng)
        finally:
            self._over.set()

    def _hit(self, blow: Blow, rng: random.Random) -> None:
        pids = self._wait_for(blow.target)
        pid = rng.choice(pids)
        try:
            os.kill(pid, signal.SIGKILL if blow.how == "kill" else signal.SIGSTOP)
            if blow.how == "stop":
                time.sleep(blow.seconds)
                os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            pass  # an earlier blow has ended its island
        self.outcome.blows[f"{blow.how} {blow.target}"] += 1

    def _wait_for(self, target: str) -> list[int]:
        deadline = time.monotonic() + 60
        while True:
            pids = [pid for name, pid in sorted(self.processes.pids.items()) if f"/{target}" in name]
            if pids:
                return pids
            assert time.monotonic() < deadline, f"no {target} was started again"
            time.sleep(0.01)

    # Afterwards

    def _check_calm(self, address: str, seconds: float = 60.0) -> None:
        """Checks that both islands serve, all pages are free, nothing runs, and nobody holds pages of an ended
        epoch."""
        deadline = time.monotonic() + seconds
        while busy := self._busy(address):
            assert time.monotonic() < deadline, f"not calm after {seconds} s: {busy}"
            time.sleep(0.1)
        workers = [pid for name, pid in self.processes.pids.items() if "gateway" not in name]
        assert len(workers) == self._num_islands * sum(self._ranks)
        shared = self._num_islands * sum(ranks > 1 for ranks in self._ranks)  # that the ranks of a worker meet in
        assert self._gpus or len(_segments(workers)) == self._own_segments * len(workers) + shared

    def _busy(self, address: str) -> str:
        try:
            with Client(address) as client:
                info = client.cluster_info()
        except CallError as error:
            return str(error)
        self.outcome.restarts = {island.name: island.restarts for island in info.islands}
        self.outcome.restarts["gateway"] = info.gateway_restarts
        broken, ends = self.outcome.broken, info.gateway_restarts
        assert broken <= ends, f"{broken} streams over HTTP, one at a time, broke off; the gateway ended {ends} times"
        if info.active or info.queued or not all(gateway.pid for gateway in info.gateways):
            return str(info)
        if [len(island.workers) for island in info.islands] != [len(self._ranks)] * self._num_islands:
            return str(info)
        return "\n".join(str(worker) for island in info.islands for worker in island.workers if _is_busy(worker))

    def _check_gone(self) -> None:
        running = [pid for pid, start in self.processes.started if start and started_at(pid) == start]
        left = [pid for pid in running if os.path.exists(f"/proc/{pid}/fd/0")]  # what has only to be reaped is gone
        assert not left, f"processes left: {left}"


def _is_busy(worker: inference_pb2.WorkerInfo) -> bool:
    idle = worker.alive and worker.free_pages == worker.num_pages
    return not idle or bool(worker.draining_pages or worker.running or worker.waiting)


def _segments(pids: Sequence[int]) -> set[str]:
    """Returns the memory segments that these processes map, by inode."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return {line.split()[4] for line in lines if "memfd:tandem" in line}
