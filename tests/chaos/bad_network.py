"""Control messages between gateway and workers that come late, twice, or not at all; in the gateways of tests only."""

import asyncio
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from tandem.cluster.gateway.settings import GatewaySettings
from tandem.cluster.processes.forks.forked_actor import ForkedActor
from tandem.cluster.processes.placement import ANYWHERE, Where
from tandem.cluster.processes.processes import ActorSpec
from tandem.cluster.routing.prefill_hints import PrefillHints
from tandem.cluster.supervision.gateway_actor import GatewayActor
from tandem.cluster.supervision.process_modules import GPU_MODULES
from tandem.cluster.supervision.worker_actor import WorkerActor
from tests.support.local_processes import LocalGroup, LocalProcesses

SHARING = "tests.benchmarks.shared_gpus"  # imports Ray, which takes a second
LONGEST_DELAY_SECONDS = 0.2  # four leases of the storm
MOST_MESSAGES = 30
KINDS = ("late", "request lost", "answer lost", "twice")
SHARES = (0.10, 0.03, 0.03, 0.06)

Send = Callable[[Any, Any], Awaitable[Any]]
Answer = Callable[[Any], Awaitable[None]]


@dataclass(frozen=True)
class BadNetwork:
    """A network that loses, delays and repeats messages. The seed decides what happens to the n-th message. Each fault
    is a line of the log, which outlives kills."""

    seed: int
    log: Path

    def faults(self) -> Counter[str]:
        """Counts each kind of fault, and how often a receiver found KV that was not what its sender sent."""
        return Counter(self.log.read_text().splitlines()) if self.log.exists() else Counter()


@dataclass(frozen=True)
class BadlyConnected:
    settings: GatewaySettings
    network: BadNetwork


class BadlyConnectedGateway(GatewayActor):
    """A gateway whose calls to workers go through a BadNetwork."""

    def __init__(self, argument: BadlyConnected) -> None:
        faults = _Faults(argument.network, argument.settings.incarnation)
        connect = grpc.aio.insecure_channel
        grpc.aio.insecure_channel = partial(connect, interceptors=[_Answers(faults), _Streams(faults)])
        PrefillHints.send = lambda *message: faults.announce(*message)  # type: ignore[method-assign]
        super().__init__(argument.settings)


class BadlyConnectedProcesses(LocalProcesses):
    def __init__(self, network: BadNetwork) -> None:
        super().__init__()
        self._network = network

    def _start(self, specs: Sequence[ActorSpec]) -> list[ForkedActor]:
        return super()._start([self._connected(spec) for spec in specs])

    def _connected(self, spec: ActorSpec) -> ActorSpec:
        if not isinstance(spec.argument, GatewaySettings):
            return spec
        return ActorSpec(spec.name, BadlyConnectedGateway, BadlyConnected(spec.argument, self._network))


class BadlyConnectedOnGpus(BadlyConnectedProcesses):
    """The workers of all islands share the GPUs of this host."""

    modules = (*GPU_MODULES, SHARING)

    def start_group(
        self, specs: Sequence[ActorSpec], *, gpus: int, threads: int, where: Where = ANYWHERE
    ) -> LocalGroup[ForkedActor]:
        return LocalGroup(self._start(specs), self._start)

    def _connected(self, spec: ActorSpec) -> ActorSpec:
        if spec.kind is not WorkerActor:
            return super()._connected(spec)
        return replace(spec, kind=import_module(SHARING).SharingWorker)


_send = PrefillHints.send


class _Faults:
    """Draws a fault for each message, and keeps duplicates until they are answered."""

    def __init__(self, network: BadNetwork, incarnation: int) -> None:
        self._random = random.Random(f"{network.seed} {incarnation}")
        self._log = os.open(network.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._copies: set[asyncio.Task[None]] = set()

    async def call(self, continuation: Send, details: Any, request: Any, answer: Answer) -> tuple[Any, float | None]:
        """Sends a request, unless it is lost: then it raises, as for a broken connection.

        The call, and None; or, where the answer is to be lost, a number between 0 and 1 that says after how much of it.
        answer: waits for all that comes of a call; for what was sent twice, the second time.
        """
        name = details.method.decode() if isinstance(details.method, bytes) else details.method
        kind, amount = self._draw(name.rpartition("/")[2])
        if kind == "request lost":
            raise _broken()
        if kind == "late":
            await asyncio.sleep(amount * LONGEST_DELAY_SECONDS)
        call = await continuation(details, request)
        if kind == "twice":
            self.in_background(_again(continuation, details, request, amount, answer))
        return call, amount if kind == "answer lost" else None

    async def announce(self, announcements: PrefillHints, request: Any) -> None:
        kind, amount = self._draw("Announce")
        if kind == "late":
            await asyncio.sleep(amount * LONGEST_DELAY_SECONDS)
        if kind != "request lost":
            await _send(announcements, request)
        if kind == "twice":
            await asyncio.sleep(amount * LONGEST_DELAY_SECONDS)
            await _send(announcements, request)
        if kind == "answer lost" and announcements._call is not None:
            announcements._call.cancel()

    def _draw(self, name: str) -> tuple[str, float]:
        """Draws a fault for a message, or none, and a number between 0 and 1."""
        kind = self._random.choices(("", *KINDS), (1 - sum(SHARES), *SHARES))[0]
        if kind:
            self.note(f"{name} {kind}")
        return kind, self._random.random()

    def note(self, what: str) -> None:
        os.write(self._log, f"{what}\n".encode())

    def in_background(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._copies.add(task)
        task.add_done_callback(self._copies.discard)


class _Answers(grpc.aio.UnaryUnaryClientInterceptor):
    """Faults of PrepareReceive, RemoteSend, Abort."""

    def __init__(self, faults: _Faults) -> None:
        self._faults = faults

    async def intercept_unary_unary(self, continuation: Send, client_call_details: Any, request: Any) -> Any:
        call, lost = await self._faults.call(continuation, client_call_details, request, _one)
        if lost is not None:
            await call
            raise _broken()
        return call


class _Streams(grpc.aio.UnaryStreamClientInterceptor):
    """Faults of StartGenerate. A lost answer loses all that would follow it."""

    def __init__(self, faults: _Faults) -> None:
        self._faults = faults

    async def intercept_unary_stream(self, continuation: Send, client_call_details: Any, request: Any) -> Any:
        call, lost = await self._faults.call(continuation, client_call_details, request, _all)
        self._faults.in_background(self._watch(call))
        return call if lost is None else _cut(call, int(lost * MOST_MESSAGES))

    async def _watch(self, call: Any) -> None:
        if await call.code() == grpc.StatusCode.DATA_LOSS:
            self._faults.note("corrupt")


async def _again(continuation: Send, details: Any, request: Any, amount: float, answer: Answer) -> None:
    await asyncio.sleep(amount * LONGEST_DELAY_SECONDS)
    with suppress(grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.CancelledError):
        await answer(await continuation(details, request))


async def _one(call: Any) -> None:
    await call


async def _all(call: Any) -> None:
    async for _ in call:
        pass


async def _cut(call: Any, num_messages: int) -> AsyncIterator[Any]:
    async for message in call:
        if not num_messages:
            call.cancel()
            raise _broken()
        num_messages -= 1
        yield message


def _broken() -> grpc.aio.AioRpcError:
    """Returns the error that a caller gets when a connection breaks."""
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "lost")
