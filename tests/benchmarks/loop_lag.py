"""Measures how long the gateway's event loop is held by one thing, for each kind of large call. Prints JSON.

A gateway in a process of its own, a worker that computes nothing and says what a kind's script has, and clients in a
process that gives way to all others. For each kind:

    lag_p99_ms, lag_max_ms   what the event loop was late for a timer of 2 ms by; on a busy machine others count, too
    step_max_ms              CPU time of the loop's thread in the longest of its callbacks
    slowest                  which one that was
    round_max_ms             CPU time of the loop's thread between two timers
    loop_ms                  CPU time of the loop's thread for all of it
    gc_max_ms                the longest collection of garbage
    mib, rest_mib            what the gateway's memory grew by at most, and what of it stayed
    seconds, received_mib    until all calls had their answers, and the answers
    statuses                 of the answers

`small_answers` has calls_s and loop_us_a_call, too: small whole answers a second, 64 at once, and CPU time of the
loop's thread for each. A new kind is a function of
`tests/benchmarks/loop_lag_kinds.py`.
"""

import asyncio
import gc
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders

from tandem.cluster.client import AsyncClient
from tandem.cluster.gateway.gateway import Gateway
from tandem.cluster.gateway.settings import GatewaySettings
from tandem.cluster.processes.garbage import IdleCollections
from tandem.cluster.processes.heap import keep_freed_memory
from tandem.cluster.routing.membership import IslandState
from tandem.cluster.text.tokenizer import Tokenizer
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tandem.proto import inference_pb2, worker_pb2
from tandem.workers.event_loop import EventLoopThread
from tests.benchmarks.attack_kinds import use_slow_tokenizer
from tests.benchmarks.attacks import child_of, children_of, resident_mib, settings_of
from tests.benchmarks.frontends import CALL_SECONDS, process_of
from tests.benchmarks.loop_lag_kinds import GENERATE, GONE_SECONDS, KINDS, Call, Kind, data_of
from tests.benchmarks.options import Budget, add_list, add_seconds, benchmark_parser
from tests.benchmarks.results import at_most, percentile, print_result, rounded
from tests.cluster.fake_worker import FakeWorker

TICK_SECONDS = 0.002
TOKENS_A_MESSAGE = 8
PROMPT_TOKENS_A_MESSAGE = 2048
TOP = 20
KIND_SECONDS = 180.0
SETTLE_SECONDS = 0.5
SMALL_ROUNDS = 16
POLL_SECONDS = 0.02


@dataclass
class TalkingWorker(FakeWorker):
    """A worker whose streams get their script's tokens, as fast as they are read."""

    script: list[int] = field(default_factory=lambda: [97])

    async def RemoteSend(self, request: worker_pb2.RemoteSendRequest, context: Any) -> worker_pb2.RemoteSendResponse:
        tops = scored(self.script[:1]) if request.sampling.HasField("logprobs") else [None]
        return worker_pb2.RemoteSendResponse(first_token=self.script[0], prefill_seconds=1.0, logprobs=tops[0])

    async def StartGenerate(
        self, request: worker_pb2.StartGenerateRequest, context: Any
    ) -> AsyncIterator[worker_pb2.GeneratedTokens]:
        self._prepared.pop(request.request_id)
        script, has_logprobs = self.script, request.sampling.HasField("logprobs")
        most = request.sampling.max_tokens
        for begin in range(1, most, TOKENS_A_MESSAGE):
            ids = [script[at % len(script)] for at in range(begin, min(begin + TOKENS_A_MESSAGE, most))]
            last: Any = 2 if begin + len(ids) >= most else 0
            logprobs = scored(ids) if has_logprobs else []
            yield worker_pb2.GeneratedTokens(token_ids=ids, logprobs=logprobs, finish_reason=last)
        if most <= 1:
            length: Any = 2
            yield worker_pb2.GeneratedTokens(finish_reason=length)

    async def PromptLogprobs(
        self, request: worker_pb2.PromptLogprobsRequest, context: Any
    ) -> AsyncIterator[worker_pb2.PackedLogprobs]:
        await context.send_initial_metadata(())
        left = len(self._prepared[request.request_id][0]) - 1
        while left > 0:
            count = min(left, PROMPT_TOKENS_A_MESSAGE)
            ids = np.tile(np.arange(TOP, dtype="<u4"), count)
            values = -np.arange(count * TOP, dtype="<f4") / 7
            yield worker_pb2.PackedLogprobs(
                logprobs=values[:count].tobytes(), top_ids=ids.tobytes(), top_logprobs=values.tobytes()
            )
            left -= count


def scored(ids: list[int]) -> list[inference_pb2.TokenLogprobs]:
    """Log-probabilities of these tokens."""
    one = inference_pb2.TokenLogprob
    tops = [one(token_id=number, logprob=-number / 7) for number in range(TOP)]
    return [inference_pb2.TokenLogprobs(chosen=one(token_id=token, logprob=-0.25), top=tops) for token in ids]


def serve_worker(pipe: Connection) -> None:
    """Serves in a process of its own: sends its island, then takes scripts until it gets None."""
    os.nice(5)
    events, worker = EventLoopThread("worker"), TalkingWorker(lambda _: 7)
    events.run(worker.start(), CALL_SECONDS)
    pipe.send(worker.state("i", epoch=1, version=1))
    while (script := pipe.recv()) is not None:
        worker.script = script
        pipe.send(True)
    events.run(worker.stop(), CALL_SECONDS)
    events.stop()


@dataclass
class LoopWatch:
    """Measures what holds up an event loop, by its timers and by its callbacks."""

    lags: list[float] = field(default_factory=lambda: [0.0])
    rounds: list[float] = field(default_factory=lambda: [0.0])
    step: tuple[float, str] = (0.0, "")
    collection: float = 0.0

    def attach(self) -> None:
        """Looks at all callbacks and collections of this process from now on."""
        run, clock = asyncio.Handle._run, time.thread_time  # type: ignore[attr-defined]  # unseen by pyright
        began = 0.0

        def watched(handle: Any) -> None:
            before = clock()
            what = handle._callback
            run(handle)
            took = clock() - before
            if took > self.step[0]:
                self.step = (took, named(what))

        def collected(phase: str, _: object) -> None:
            nonlocal began
            if phase == "start":
                began = time.perf_counter()
            else:
                self.collection = max(self.collection, time.perf_counter() - began)

        asyncio.Handle._run = watched  # type: ignore[attr-defined,method-assign]
        gc.callbacks.append(collected)

    async def tick(self) -> None:
        used = time.thread_time()
        while True:
            due = time.perf_counter() + TICK_SECONDS
            await asyncio.sleep(TICK_SECONDS)
            self.lags.append(time.perf_counter() - due)
            self.rounds.append(time.thread_time() - used)
            used += self.rounds[-1]

    async def taken(self) -> dict[str, Any]:
        """Returns what was seen since the last call."""
        lags, self.lags = self.lags, [0.0]
        rounds, self.rounds = self.rounds, [0.0]
        (step, slowest), self.step = self.step, (0.0, "")
        collection, self.collection = self.collection, 0.0
        return {
            "lag_p99_ms": percentile(lags, 99) * 1e3,
            "lag_max_ms": max(lags) * 1e3,
            "step_max_ms": step * 1e3,
            "slowest": slowest,
            "round_max_ms": max(rounds) * 1e3,
            "loop_ms": sum(rounds) * 1e3,
            "gc_max_ms": collection * 1e3,
        }


def named(callback: Any) -> str:
    """A callback's name, and of a task's step that of its coroutine."""
    task = getattr(callback, "__self__", None)
    if isinstance(task, asyncio.Task):
        coroutine: Any = task.get_coro()
        return str(getattr(coroutine, "__qualname__", coroutine))
    return str(getattr(callback, "__qualname__", callback))[:120]


def use_decoder(folder: Path) -> None:
    """Lets the checkpoint's byte-level tokenizer write its bytes again, as guided output needs it."""
    path = str(folder / "tokenizer.json")
    inner = tokenizers.Tokenizer.from_file(path)
    inner.decoder = decoders.ByteLevel()
    inner.save(path)


def serve_gateway(pipe: Connection, settings: GatewaySettings, island: IslandState) -> None:
    """Serves in a process of its own: sends its addresses, then what held its loop as often as asked."""
    keep_freed_memory()  # as in a cluster
    events, watch = EventLoopThread("gateway"), LoopWatch()
    gateway = Gateway(settings)
    watch.attach()
    addresses = events.run(gateway.start(), CALL_SECONDS)
    gateway.prepare()
    events.run(gateway.update_island(island), CALL_SECONDS)
    works = [events.start(IdleCollections(lambda: not gateway.running).run()), events.start(watch.tick())]
    pipe.send(addresses)
    while pipe.recv():
        pipe.send(events.run(watch.taken(), CALL_SECONDS))
    for work in works:
        work.cancel()
    events.run(gateway.stop(0.1), CALL_SECONDS)
    events.stop()


def serve_clients(pipe: Connection, grpc: str, http: str) -> None:
    """Makes calls in a process of its own: those of each kind that it is asked for, `rounds` times."""
    os.nice(10)
    while (asked := pipe.recv()) is not None:
        calls, rounds = asked
        pipe.send(asyncio.run(called(calls, rounds, grpc, http)))


async def called(calls: list[Call], rounds: int, grpc: str, http: str) -> tuple[float, int, Counter[str]]:
    """Seconds, bytes received, and statuses."""
    statuses, began, received = Counter[str](), time.perf_counter(), 0
    async with AsyncClient(grpc, client_id="large") as client:
        for _ in range(rounds):
            sizes = await asyncio.gather(
                *(over_grpc(client, one) if one.path == GENERATE else over_http(http, one, statuses) for one in calls)
            )
            received += sum(sizes)
    return time.perf_counter() - began, received, statuses


async def over_grpc(client: AsyncClient, call: Call) -> int:
    body = dict(call.body)
    size = 0
    async for message in client.generate(body.pop("prompt"), **body, ignore_eos=True):
        size += len(message.token_ids)
    return size


async def over_http(address: str, call: Call, statuses: Counter[str]) -> int:
    """Bytes of the answer."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 20)
    data = b"" if call.body is None else data_of(call.body)
    head = f"{'GET' if call.body is None else 'POST'} {call.path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    kind = "" if call.body is None else f"content-type: application/json\r\ncontent-length: {len(data)}\r\n"
    size = 0
    try:
        writer.write(f"{head}{kind}\r\n".encode() + data)
        with suppress(TimeoutError):
            async with asyncio.timeout(GONE_SECONDS if call.leaves else None):
                first = await reader.read(1 << 18)
                statuses[first[9:12].decode()] += 1
                size = len(first)
                while block := await reader.read(1 << 18):
                    size += len(block)
    finally:
        writer.close()
    return size


@dataclass
class Stage:
    gateway: Connection
    worker: Connection
    clients: Connection
    gateway_pid: int
    tokenizer: Tokenizer

    def look(self, kind: Kind, rounds: int = 1) -> dict[str, Any]:
        """Returns what held the loop while the calls of a kind were answered."""
        self.worker.send(self.tokenizer.encode(kind.script))
        self.worker.recv()
        self._taken()
        before = most = resident_mib(self.gateway_pid)
        self.clients.send((list(kind.calls), rounds))
        ends = time.monotonic() + KIND_SECONDS
        while not self.clients.poll(POLL_SECONDS) and time.monotonic() < ends:
            most = max(most, resident_mib(self.gateway_pid))
        seconds, received, statuses = self.clients.recv()
        time.sleep(SETTLE_SECONDS)
        numbers = self._taken()
        rest = resident_mib(self.gateway_pid) - before
        numbers |= {"mib": most - before, "rest_mib": rest, "seconds": seconds, "received_mib": received / (1 << 20)}
        if rounds > 1:
            calls = len(kind.calls) * rounds
            numbers |= {"calls_s": calls / seconds, "loop_us_a_call": numbers["loop_ms"] / calls * 1e3}
        return {name: rounded(one) if isinstance(one, float) else one for name, one in numbers.items()} | {
            "statuses": dict(statuses)
        }

    def _taken(self) -> dict[str, Any]:
        self.gateway.send(True)
        return self.gateway.recv()


def measure(names: list[str], budget: Budget) -> dict[str, dict[str, Any]]:
    """Per kind the numbers."""
    found: dict[str, dict[str, Any]] = {}
    parsers = {"gateway.tool_parser": "tagged", "gateway.reasoning_parser": "none"}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        make_checkpoint(Path(folder), arch="llama", size="tiny")
        use_slow_tokenizer(Path(folder))
        use_decoder(Path(folder))
        worker = stack.enter_context(process_of(serve_worker))
        island = worker.recv()
        known = children_of(os.getpid())  # multiprocessing's own process is among them now
        gateway = stack.enter_context(process_of(serve_gateway, settings_of(folder, parsers), island))
        pid = child_of(os.getpid(), known)
        addresses = gateway.recv()
        clients = stack.enter_context(process_of(serve_clients, addresses.grpc, addresses.http))
        tokenizer = Tokenizer.from_folder(Path(folder))
        assert tokenizer is not None, "use_slow_tokenizer() has made it"
        stage = Stage(gateway, worker, clients, pid, tokenizer)
        small = KINDS["small_answers"]()
        stage.look(small)  # makes what is made once
        for name in budget.within(names):
            found[name] = stage.look(KINDS[name](), SMALL_ROUNDS if name == "small_answers" else 1)
            print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = benchmark_parser(__file__, __doc__)
    add_list(parser, "--kinds", choices=list(KINDS), default=list(KINDS), help="which; all by default")
    add_seconds(parser)
    given = parser.parse_args()
    found = measure(given.kinds, Budget(given.seconds))
    targets = [at_most(f"{name}.step_max_ms", one["step_max_ms"], 20.0) for name, one in found.items()]
    print_result({**found, "targets": targets}, given)


if __name__ == "__main__":
    main()
