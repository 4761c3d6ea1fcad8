"""Measures what the control plane costs: maps, planning, messages. Prints JSON.

map_bytes       PositionMap message of 32K tokens, page 16: fresh pages, and 2048 random pages of 65,536
codec_us        encode + decode of the fresh map, median
decode_step_us  scheduler and plan of a decode step of 256 sequences at context 1K, median; spread: at contexts of which
                a sixteenth begins a page at every step
calls           seconds of the control messages of one request (Announce, PrepareReceive, RemoteSend, StartGenerate, as
                the gateway sends them, answered at once) ÷ as many bare grpc.aio calls of the same kinds, same run
"""

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import numpy as np
import torch

from tandem.cache.kinds.kv import KV
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.position_map import PositionMap, SlotRuns
from tandem.cache.plan.rope import RopeParameters
from tandem.cluster.requests.fair_turns import FairTurns
from tandem.cluster.requests.generation import Generation
from tandem.cluster.requests.validation import ValidRequest
from tandem.cluster.routing.admission import AdmissionQueue
from tandem.cluster.routing.islands import Islands
from tandem.cluster.routing.membership import IslandState
from tandem.cluster.routing.policy import least_loaded
from tandem.cluster.routing.router import Router
from tandem.cluster.routing.worker_link import WorkerAddress
from tandem.proto import worker_pb2, worker_pb2_grpc
from tandem.transfer.completion import Signal
from tandem.transfer.wire_map import WireMap, decode_map, encode_map
from tandem.workers.config import Role
from tandem.workers.ports.authentication import TokenRequired
from tandem.workers.requests.decode_request import DecodeRequest
from tandem.workers.requests.token_stream import TokenStream
from tandem.workers.sampling.finish import FinishRule
from tandem.workers.sampling.pending_samples import CopiedSamples
from tandem.workers.sampling.sampling_params import SamplingParams
from tandem.workers.scheduling.scheduler import Scheduler
from tandem.workers.wire.messages import reservation_to_proto
from tandem.workers.wire.prompt_spec import PromptSpec
from tandem.workers.wire.reservation import Reservation
from tests.benchmarks.measured import Measured
from tests.benchmarks.options import Budget, add_list, add_seconds, benchmark_parser
from tests.benchmarks.results import at_most, print_result
from tests.support.prompt_specs import prompt_message
from tests.support.tvm_cache import TvmCache

PAGE, TOKENS, POOL_PAGES = 16, 32 * 1024, 65_536
ROWS, CONTEXT = 256, 1024
PARTS = ("map", "step", "calls")
LAYOUT = KVLayout((LayerGroup(tuple(range(36)), KV(8, 128)),), PAGE, torch.bfloat16)


def median_us(call: Callable[[], object], rounds: int = 300) -> Measured:
    for _ in range(20):
        call()
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return Measured.median(seconds, 1e6)


def position_map(pages: np.ndarray) -> PositionMap:
    slots = (pages[:, None] * PAGE + np.arange(PAGE)).reshape(-1)
    return PositionMap(0, (SlotRuns.from_slots(slots.astype(np.int32)),))


def message_of(wire: WireMap) -> worker_pb2.PositionMap:
    return worker_pb2.PositionMap(
        start_position=wire.start_position,
        num_tokens=wire.num_tokens,
        page_size=wire.page_size,
        runs=wire.runs,
        layout_fingerprint=wire.layout_fingerprint,
    )


def map_costs() -> dict[str, Any]:
    fresh = position_map(np.arange(1000, 1000 + TOKENS // PAGE))
    random = position_map(np.random.default_rng(0).permutation(POOL_PAGES)[: TOKENS // PAGE])

    def round_trip() -> PositionMap:
        wire = encode_map(fresh, LAYOUT)
        return decode_map(wire, LAYOUT, num_pages=(POOL_PAGES,), expected_start=0, expected_tokens=TOKENS)

    assert round_trip() == fresh
    random_bytes = message_of(encode_map(random, LAYOUT)).ByteSize()
    return {
        "fresh_bytes": message_of(encode_map(fresh, LAYOUT)).ByteSize(),
        "random_bytes": random_bytes,
        "random_ratio_to_raw": round(random_bytes / (TOKENS * 4), 4),
        "fresh_encode_decode_us": median_us(round_trip),
    }


def decode_step_us(batch_size: int, context: int, *, spread: bool = False) -> Measured:
    layout = KVLayout((LayerGroup((0,), KV(1, 8)),), PAGE, torch.float32)
    num_pages = batch_size * (context // PAGE + 8)
    cache = TvmCache(
        layout,
        (torch.zeros(num_pages, *layout.page_shape(0)),),
        max_sequences=batch_size,
        max_sequence_length=context * 2,
        rope=RopeParameters("default", 8),
        writer=None,
    )
    params = SamplingParams(max_tokens=1_000_000, temperature=0)
    scheduler = Scheduler(batch_size)
    rows = scheduler.rows
    requests = []
    for sequence in range(batch_size):
        cache.add_sequence(sequence)
        length = context - (sequence * 7 % (4 * PAGE) if spread else 0)
        cache.prepare_receive(sequence, length)
        cache.finish_receive(sequence)
        cache.reserve(sequence, context + 8 * PAGE)
        prompt = PromptSpec(np.ones(length, np.int64))
        request = DecodeRequest(str(sequence), sequence, prompt, Signal(0, 1), length, params.max_tokens)
        request.params, request.rule, request.token_stream = params, FinishRule.of(params, (2,)), TokenStream()
        request.output.append(5)
        requests.append(request)
    rows.join(requests)
    drawn = torch.full((batch_size,), 5)

    def step() -> None:
        decodes = scheduler.next_batch().decodes
        assert decodes is not None
        cache.begin_forward(decodes.sequence_ids, np.ones(batch_size, np.int64))
        in_flight = rows.launched(decodes, CopiedSamples(drawn, None))
        sampled = in_flight.pending.wait().token_ids
        rows.learn(sampled)
        in_flight.reasons(sampled)

    return median_us(step, rounds=100)


class AtOnce(worker_pb2_grpc.WorkerServicer):
    """Answers every call at once, with messages of the usual size."""

    def __init__(self) -> None:
        self._reservation = reservation_to_proto(
            Reservation(
                reservation_id=1,
                epoch=1,
                target_pe=1,
                signal_slot=0,
                generation=1,
                matched_tokens=0,
                wire_map=encode_map(position_map(np.arange(64)), LAYOUT),
                pages=64,
                writer_pe=0,
                lease_seconds=30.0,
            ),
            token="token",
        )

    async def Announce(self, request_iterator: Any, context: Any) -> AsyncIterator[worker_pb2.FirstToken]:
        async for request in request_iterator:
            yield worker_pb2.FirstToken(request_id=request.request_id, token_id=5)

    async def PrepareReceive(self, request: Any, context: Any) -> worker_pb2.Reservation:
        return self._reservation

    async def RemoteSend(self, request: Any, context: Any) -> worker_pb2.RemoteSendResponse:
        return worker_pb2.RemoteSendResponse(first_token=5)

    async def StartGenerate(self, request: Any, context: Any) -> AsyncIterator[worker_pb2.GeneratedTokens]:
        yield worker_pb2.GeneratedTokens(token_ids=[5], finish_reason=2)  # type: ignore[arg-type]


async def call_costs(rounds: int) -> dict[str, float]:
    token = "a token of the workers"
    server = grpc.aio.server(interceptors=[TokenRequired(token)])
    worker_pb2_grpc.add_WorkerServicer_to_server(AtOnce(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    address = f"127.0.0.1:{port}"
    islands = Islands(16 << 20, least_loaded, page_size=16)
    workers = tuple(WorkerAddress(role, pe, address, token) for pe, role in enumerate((Role.PREFILL, Role.DECODE)))
    await islands.update(IslandState("i", epoch=1, restarts=0, workers=workers, version=1))
    router = Router(islands, AdmissionQueue(8, 1 << 20), id_prefix="1.", queue_seconds=5)
    prompt = PromptSpec(np.arange(1024))
    params, turns = SamplingParams(max_tokens=2, temperature=0, seed=1), FairTurns(1)

    async def drop(message: Any) -> None:
        pass

    async def request() -> None:
        placement = await router.place("r", prompt, 2, "client")
        generation = Generation(ValidRequest("r", prompt, params), time.perf_counter(), None, (), turns)
        await generation.run(placement, 5.0, drop)
        await router.give_back(placement, generation.complete)

    bare_server = grpc.aio.server()
    worker_pb2_grpc.add_WorkerServicer_to_server(AtOnce(), bare_server)
    bare_port = bare_server.add_insecure_port("127.0.0.1:0")
    await bare_server.start()
    bare_stub = worker_pb2_grpc.WorkerStub(grpc.aio.insecure_channel(f"127.0.0.1:{bare_port}"))
    announce = worker_pb2.AnnounceRequest(request_id="r", epoch=1, prompt=prompt_message(prompt.token_ids))
    prepare = worker_pb2.PrepareReceiveRequest(
        request_id="r", epoch=1, prompt=prompt_message(prompt.token_ids), max_tokens=2
    )
    reservation = await bare_stub.PrepareReceive(prepare)
    send = worker_pb2.RemoteSendRequest(
        request_id="r", epoch=1, prompt=prompt_message(prompt.token_ids), reservation=reservation
    )
    start = worker_pb2.StartGenerateRequest(request_id="r", epoch=1, reservation_id=1)

    announcements = bare_stub.Announce(timeout=60)

    async def bare() -> None:
        await announcements.write(announce)
        await bare_stub.PrepareReceive(prepare, timeout=5)
        stream = bare_stub.StartGenerate(start, timeout=5)
        await bare_stub.RemoteSend(send, timeout=5)
        async for _ in stream:
            pass
        await announcements.read()

    ours, theirs = [], []
    for number in range(rounds + 20):
        for call, times in ((request, ours), (bare, theirs)):
            began = time.perf_counter()
            await call()
            if number >= 20:
                times.append(time.perf_counter() - began)
    await islands.close()
    await server.stop(0)
    await bare_server.stop(0)
    return {
        "request_us": Measured.median(ours, 1e6),
        "bare_us": Measured.median(theirs, 1e6),
        "ratio": Measured.median(a / b for a, b in zip(ours, theirs, strict=True)),
    }


def targets_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the targets of the parts that were measured."""
    targets = []
    if (maps := found.get("map")) is not None:
        targets += [
            at_most("map of 32K tokens on fresh pages, bytes", maps["fresh_bytes"], 64),
            at_most("map of 32K tokens on random pages ÷ raw ids", maps["random_ratio_to_raw"], 1 / 30),
            at_most("map on fresh pages, encode and decode, µs", maps["fresh_encode_decode_us"], 100),
        ]
    if (step := found.get(f"decode_step_{ROWS}_us")) is not None:
        targets.append(at_most(f"decode step of {ROWS} sequences, µs", step, 200))
    if (calls := found.get("calls")) is not None:
        targets.append(at_most("control messages of a request ÷ bare calls", calls["ratio"], 1.3))
    return targets


def measure(options: argparse.Namespace, budget: Budget) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "map" in options.parts:
        found["map"] = map_costs()
    for rows in budget.within(options.rows if "step" in options.parts else ()):
        found[f"decode_step_{rows}_us"] = decode_step_us(rows, options.context)
        found[f"decode_step_{rows}_spread_us"] = decode_step_us(rows, options.context, spread=True)
    if "calls" in options.parts and not budget.is_spent:
        found["calls"] = asyncio.run(call_costs(options.calls))
    return found


def main() -> None:
    parser = benchmark_parser(__file__, __doc__)
    add_list(parser, "--parts", default=PARTS, choices=PARTS)
    add_list(parser, "--rows", int, default=[ROWS], help="sequences of a decode step")
    parser.add_argument("--context", type=int, default=CONTEXT, help="positions of each of them")
    parser.add_argument("--calls", type=int, default=400, help="requests whose control messages are timed")
    add_seconds(parser)
    options = parser.parse_args()
    found = measure(options, Budget(options.seconds))
    case = {} if options.context == CONTEXT else {"case": f"contexts of {options.context}"}
    print_result({**found, **case, "targets": [] if case else targets_of(found)}, options)


if __name__ == "__main__":
    main()
