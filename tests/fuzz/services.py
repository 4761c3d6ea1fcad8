"""The gateway, by both of its frontends, and one island's workers under bad calls, while good ones go on.

Every call ends in time with a status that its method may answer, INVALID_ARGUMENT naming what is wrong; nothing is
logged as an error; good requests get their tokens; and in the end the island holds nothing: no page, reservation,
stream, task or descriptor.
"""

import asyncio
import logging
import os
import random
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
from google.protobuf.message import Message

from tandem.cluster.client import AsyncClient
from tandem.proto import admin_pb2, inference_pb2, worker_pb2
from tandem.workers.ports.authentication import HEADER
from tandem.workers.wire.messages import prompt_to_bytes
from tandem.workers.worker import Worker
from tests.fuzz.http_inputs import bad_post
from tests.fuzz.mutations import TEXT, mutate_field, mutated_bytes
from tests.support.client_requests import GREEDY
from tests.support.island import Island
from tests.support.oracle import random_prompt
from tests.support.prompt_specs import prompt_message

OVERRIDES: dict[str, Any] = {
    "model.max_model_len": 96,
    "island.lease_seconds": 0.2,
    "gateway.max_attempts": 100,
    "gateway.http_port": 0,
}
CALL_SECONDS = 120.0  # a call that takes longer hangs, also on a busy machine
WAIT_SECONDS = 0.15  # for calls that rightly wait for what will not come
AT_ONCE = 12
GOOD_EVERY = 40  # inputs to one good request
READERS = 7  # descriptors: three for each process that reads long inputs, one for what forks them; opened when needed
IDLE_SECONDS = 20.0

OK = grpc.StatusCode.OK
INVALID = grpc.StatusCode.INVALID_ARGUMENT
STALE = grpc.StatusCode.FAILED_PRECONDITION
LATE = grpc.StatusCode.DEADLINE_EXCEEDED
FULL = grpc.StatusCode.RESOURCE_EXHAUSTED
ENDED = grpc.StatusCode.ABORTED
DENIED = grpc.StatusCode.UNAUTHENTICATED
UNKNOWN = grpc.StatusCode.NOT_FOUND  # an adapter
MISSING = grpc.StatusCode.UNIMPLEMENTED


@dataclass(frozen=True)
class Method:
    """A method to fuzz. If DEADLINE_EXCEEDED is among its statuses, a call in order may wait until its deadline."""

    name: str
    kind: type[Message]
    statuses: frozenset[grpc.StatusCode]

    @property
    def fields(self) -> frozenset[str]:
        """Names that a refusal may give, including fields of nested messages."""
        names: set[str] = {self.kind.__name__}
        pending = [self.kind.DESCRIPTOR]
        while pending:
            for each in pending.pop().fields:
                names.add(each.name)
                if each.message_type is not None:
                    pending.append(each.message_type)
        return frozenset(names)


GENERATE = Method("Inference/Generate", inference_pb2.GenerateRequest, frozenset({OK, INVALID, ENDED}))
SCALE = Method("Admin/Scale", admin_pb2.ScaleRequest, frozenset({INVALID, LATE}))
GATEWAY = (
    *[GENERATE] * 5,
    SCALE,
    Method("Inference/GetModelInfo", inference_pb2.GetModelInfoRequest, frozenset({OK, INVALID})),
    Method("Inference/GetClusterInfo", inference_pb2.GetClusterInfoRequest, frozenset({OK, INVALID})),
)
PREPARE = Method(
    "Worker/PrepareReceive", worker_pb2.PrepareReceiveRequest, frozenset({OK, INVALID, STALE, FULL, UNKNOWN})
)
ANNOUNCE = Method("Worker/Announce", worker_pb2.AnnounceRequest, frozenset({OK, INVALID, STALE}))
SEND = Method("Worker/RemoteSend", worker_pb2.RemoteSendRequest, frozenset({OK, INVALID, STALE, ENDED, UNKNOWN}))
START = Method("Worker/StartGenerate", worker_pb2.StartGenerateRequest, frozenset({OK, INVALID, STALE, LATE}))
ABORT = Method("Worker/Abort", worker_pb2.AbortRequest, frozenset({OK, INVALID, STALE}))
LOAD = Method("Worker/LoadAdapter", worker_pb2.LoadAdapterRequest, frozenset({INVALID, STALE}))
REMOVE = Method("Worker/RemoveAdapter", worker_pb2.RemoveAdapterRequest, frozenset({OK, INVALID, STALE}))
STATUS = Method("Worker/GetStatus", worker_pb2.GetStatusRequest, frozenset({OK, INVALID}))
PREFILL, DECODE = (ANNOUNCE, SEND, ABORT, LOAD, STATUS), (PREPARE, START, ABORT, REMOVE, STATUS)


@dataclass
class Outcome:
    """Counts of each status, and of the good requests that got their tokens."""

    statuses: Counter[str] = field(default_factory=Counter)
    good: int = 0


class Defects(logging.Handler):
    """Collects what was logged as an error. A refused call is none. A forward that fails for one sequence fails for
    all, and they may go on elsewhere."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(logging.Formatter().format(record))


class Fuzz:
    """`count` inputs drawn from `seed`, over an island that runs in this process. AssertionErrors name the input."""

    def __init__(self, island: Island, seed: int) -> None:
        self._island = island
        self._seed = seed
        self._vocabulary = island.workers[0].model_config.vocab_size
        self.outcome = Outcome()

    def run(self, count: int) -> Outcome:
        defects, log = Defects(), logging.getLogger("tandem")
        log.addHandler(defects)
        try:
            asyncio.run(self._run(range(AT_ONCE)))  # what is opened once, is now
            before = self._open()
            descriptors = _descriptors()
            asyncio.run(self._run(range(AT_ONCE, count)))
            self._wait_until_idle(before, descriptors)
        finally:
            log.removeHandler(defects)
        assert not defects.seen, f"{len(defects.seen)} defects were logged, the first: {defects.seen[0]}"
        return self.outcome

    async def _run(self, numbers: Sequence[int]) -> None:
        prompt = random_prompt(40, 9, self._vocabulary)
        options = (("grpc.max_receive_message_length", -1), ("grpc.enable_http_proxy", 0))
        addresses = [self._island.address, *(worker.address for worker in self._island.workers)]
        self._channels = [grpc.aio.insecure_channel(address, options=options) for address in addresses]
        self._http = httpx.AsyncClient(base_url=f"http://{self._island.http}", timeout=CALL_SECONDS, trust_env=False)
        async with self._http, AsyncClient(self._island.address) as client:
            self._expected = await _tokens(client, prompt)
            pending = iter(numbers)

            async def work() -> None:
                for number in pending:
                    try:
                        await self._one(random.Random(f"{self._seed}/{number}"), number)
                        if number % GOOD_EVERY == 0:
                            assert await _tokens(client, prompt) == self._expected, "a good request has other tokens"
                            self.outcome.good += 1
                    except BaseException as error:
                        error.add_note(f"seed {self._seed}, input {number}")
                        raise

            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(AT_ONCE):
                        group.create_task(work())
            finally:
                await asyncio.gather(*(channel.close() for channel in self._channels))

    async def _one(self, rng: random.Random, number: int) -> None:
        kind = rng.randrange(12)
        if kind > 9:
            prompt = random_prompt(rng.randrange(1, 40), number, self._vocabulary)
            self.outcome.statuses[f"HTTP {await bad_post(self._http, rng, prompt)}"] += 1
        elif kind < 5:
            method = rng.choice(GATEWAY)
            await self._bad_call(rng, 0, method, self._good(rng, method, number))
        elif kind < 8:
            pe, methods = rng.choice(((0, PREFILL), (1, DECODE)))
            method = rng.choice(methods)
            await self._bad_call(rng, pe + 1, method, self._good(rng, method, number))
        else:
            await self._bad_handshake(rng, number)

    async def _bad_call(self, rng: random.Random, server: int, method: Method, message: Message) -> None:
        data = self._spoil(rng, message)
        token: str | None = None
        if rng.random() < 0.05:
            token = rng.choice(("", "Bearer ", "Bearer x", "Basic eDp4", "Bearer " + "y" * 5000))
        name = method.name + (rng.choice(("X", "/", "")) if rng.random() < 0.02 else "")
        allowed = method.statuses | ({MISSING} if name != method.name else set())
        if token is not None and server:
            allowed = frozenset({DENIED})
        await self._call(server, method, data, allowed, name, token)

    async def _bad_handshake(self, rng: random.Random, number: int) -> None:
        """Places a request as a gateway would, with one message spoilt; then gives it back in order."""
        request_id = f"fuzz/{number}"
        prompt = random_prompt(rng.randrange(1, 80), number, self._vocabulary)  # shares no prefix with the good one
        bad = rng.randrange(4)
        if rng.random() < 0.5:
            announce = worker_pb2.AnnounceRequest(request_id=request_id, epoch=1, prompt=prompt_message(prompt))
            announced = self._spoil(rng, announce) if bad == 3 else announce.SerializeToString()
            await self._call(1, ANNOUNCE, announced, ANNOUNCE.statuses)
        prepare = worker_pb2.PrepareReceiveRequest(
            request_id=request_id, epoch=1, prompt=prompt_message(prompt), max_tokens=rng.randrange(1, 9)
        )
        answer = await self._call(2, PREPARE, prepare.SerializeToString(), PREPARE.statuses)
        if not answer:
            return
        reservation = worker_pb2.Reservation.FromString(answer[0])
        sampling = inference_pb2.SamplingParams(max_tokens=prepare.max_tokens, temperature=0)
        send = worker_pb2.RemoteSendRequest(
            request_id=request_id, epoch=1, prompt=prompt_message(prompt), sampling=sampling, reservation=reservation
        )
        start = worker_pb2.StartGenerateRequest(
            request_id=request_id, epoch=1, reservation_id=reservation.reservation_id, sampling=sampling
        )
        first = self._spoil(rng, send) if bad == 0 else send.SerializeToString()
        second = self._spoil(rng, start) if bad == 1 else start.SerializeToString()
        await asyncio.gather(self._call(1, SEND, first, SEND.statuses), self._call(2, START, second, START.statuses))
        abort = worker_pb2.AbortRequest(request_id=request_id, epoch=1)
        await self._call(1, ABORT, abort.SerializeToString(), ABORT.statuses)
        abort.writer_quiet = True
        spoilt = self._spoil(rng, abort) if bad == 2 else abort.SerializeToString()
        await self._call(2, ABORT, spoilt, ABORT.statuses)

    async def _call(
        self,
        server: int,
        method: Method,
        data: bytes,
        allowed: frozenset[grpc.StatusCode] | set[grpc.StatusCode],
        name: str | None = None,
        token: str | None = None,
    ) -> list[bytes]:
        """Returns the messages that came; none if the call was refused with one of the allowed statuses."""
        if token is None and server:
            token = f"Bearer {self._island.workers[server - 1].config.token}"
        call = self._channels[server].unary_stream(f"/tandem.v1.{name or method.name}")
        metadata = () if token is None else ((HEADER, token),)
        seconds = WAIT_SECONDS if LATE in allowed else CALL_SECONDS
        answers: list[bytes] = []
        code, details = OK, ""
        try:
            async for answer in call(data, metadata=metadata, timeout=seconds):
                answers.append(answer)
        except grpc.aio.AioRpcError as error:
            code, details = error.code(), error.details() or ""
        self.outcome.statuses[f"{method.name} {code.name}"] += 1
        described = f"{method.name} with {data[:500]!r} answered {code.name}: {details[:500]}"
        assert code in allowed, described
        if code == INVALID:
            assert any(known in details for known in method.fields) or "bytes of the request" in details, described
        return answers if code == OK else []

    def _good(self, rng: random.Random, method: Method, number: int) -> Message:
        """Makes a message that the method would accept, if the earlier calls that belong to it had been made."""
        prompt = random_prompt(rng.randrange(1, 40), number, self._vocabulary)
        sampling = inference_pb2.SamplingParams(max_tokens=rng.randrange(1, 6), temperature=rng.choice((0, 1)), seed=3)
        values: dict[str, Any] = {
            "request_id": f"bad/{number}", "epoch": 1, "sampling": sampling, "max_tokens": 4, "num_decode": 1,
            "token_ids": inference_pb2.TokenIds(ids=prompt), "prompt": prompt_message(prompt),
            "reservation": worker_pb2.Reservation(epoch=1, target_pe=1, generation=1, lease_seconds=1),
            "reservation_id": number,
        }  # fmt: skip
        message = method.kind(
            **{name: value for name, value in values.items() if name in method.kind.DESCRIPTOR.fields_by_name}
        )
        if isinstance(message, inference_pb2.GenerateRequest):
            chosen = rng.random()
            if chosen < 0.2:
                message.text = rng.choice(TEXT)
            elif chosen < 0.6:
                message.token_bytes = prompt_to_bytes(prompt)
            elif chosen < 0.8:
                message.chat.messages.add(role=rng.choice(("user", "system", "x", "")), content=rng.choice(TEXT))
        return message

    def _spoil(self, rng: random.Random, message: Message) -> bytes:
        if rng.random() < 0.5:
            for _ in range(rng.choice((1, 1, 2, 5)) if message.DESCRIPTOR.fields else 0):
                mutate_field(rng, message)
            return message.SerializeToString()
        return mutated_bytes(rng, message.SerializeToString())

    def _wait_until_idle(self, before: dict[str, int], descriptors: Counter[str]) -> None:
        deadline = time.monotonic() + IDLE_SECONDS
        while True:
            more = [f"{now} {name}, {before[name]} before" for name, now in self._open().items() if now > before[name]]
            now = _descriptors()
            if now.total() > descriptors.total() + READERS:
                more.append(
                    f"{now.total()} descriptors, {descriptors.total()} before, the new ones {now - descriptors}"
                )
            left = self._held() + more
            if not left:
                return
            assert time.monotonic() < deadline, f"seed {self._seed}: still held after {IDLE_SECONDS:g} s: {left}"
            time.sleep(0.05)

    def _held(self) -> list[str]:
        held = []
        for worker in self._island.workers:
            held += worker.on_step_thread(partial(_held_by, worker))
        gateway: Any = self._island.gateway
        links = [link for island in gateway._islands._current.values() for link in island.links]
        of_gateway = {
            "calls": gateway._requests.running,
            "queued": gateway._router.queued,
            "clean-ups": len(gateway._router._cleanup),
            "orders": len(gateway._admin._outcomes),
            "placed tokens": sum(link.load for link in links),
            "first tokens": sum(len(link.hints._expected) for link in links),
        }
        return held + [f"gateway: {count} {name}" for name, count in of_gateway.items() if count]

    def _open(self) -> dict[str, int]:
        """Counts what an idle island keeps open."""
        return {f"tasks of PE {worker.config.pe}": _num_tasks(worker) for worker in self._island.workers}


def _descriptors() -> Counter[str]:
    """Counts the open descriptors of this process by kind: files by name, sockets and pipes without their numbers.

    A TCP socket is told by its own port and its peer's, in hexadecimal, and by its state as Linux numbers it.
    """
    tcp: dict[str, str] = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            own, peer, state, inode = (line.split()[index] for index in (1, 2, 3, 9))
            tcp[inode] = f"{own.rpartition(':')[2]} to {peer.rpartition(':')[2]}, state {state}"
    kinds: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # the one that listed them
            continue
        inode = re.search(r"\d+", name)
        known = tcp.get(inode[0]) if inode is not None and name.startswith("socket:") else None
        kinds[f"socket {known}" if known else re.sub(r"\d+", "N", name)] += 1
    return kinds


def _num_tasks(worker: Worker) -> int:
    async def count() -> int:
        return len(asyncio.all_tasks())

    return worker._events.run(count(), timeout=10)


def _held_by(worker: Worker) -> list[str]:
    """Lists what the worker holds for requests. Runs on its step thread."""
    cache, loop = worker.cache, worker._loop
    assert loop is not None
    counts = {
        "pages": cache.pages.total - cache.pages.free,
        "draining pages": cache.pages.draining,
        "running": loop.num_running,
        "waiting": loop.num_waiting,
    }
    return [f"{worker.config.role}: {count} {name}" for name, count in counts.items() if count]


async def _tokens(client: AsyncClient, prompt: Sequence[int]) -> list[int]:
    updates = [update async for update in client.generate(prompt, timeout=CALL_SECONDS, max_tokens=12, **GREEDY)]
    return [token for update in updates for token in update.token_ids]
