"""Clients that send calls faster than the gateway looks at them, and those that call beside them."""

import itertools
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc._cython import cygrpc

from tandem.cluster.client import Client
from tandem.cluster.errors.statuses import RETRY_AFTER_KEY
from tandem.cluster.peers.table import Column
from tandem.cluster.protocol import build_request
from tandem.proto import inference_pb2
from tandem.workers.ports import guarded_port
from tandem.workers.ports.call_turns import CallTurns
from tandem.workers.ports.listener import ACCEPTED
from tests.benchmarks.strangers import grpc_attacks as attacks
from tests.cluster.open_gateway import PROMPT, OpenGateway, open_gateway
from tests.cluster.requests.test_bursts import standing_still
from tests.support.checkpoints import save_checkpoint
from tests.support.waiting import until

CALLS = 2000
TOKEN = "of-sixteen-characters"
GREETING = attacks.PREFACE + attacks.frame(attacks.SETTINGS) + attacks.frame(attacks.SETTINGS, attacks.ACK)
HEADERS = attacks.call_headers(attacks.MODEL)
FLOODS = {
    "calls": attacks.whole(HEADERS),
    "calls of no method": attacks.whole(attacks.call_headers("/none/none")),
    "calls that are reset": attacks.then_reset(attacks.whole(HEADERS)),
    "headers that are reset": attacks.then_reset(attacks.opened(HEADERS)),
    "headers without a path": attacks.opened(attacks.literal("te", "trailers")),
}
BROKEN_OFF = {
    "without a token, and reset": attacks.then_reset(attacks.whole(attacks.call_headers(attacks.MODEL))),
    "without a message": attacks.opened(attacks.call_headers(attacks.GENERATE, TOKEN)),
    "with half a message": lambda number: (
        attacks.opened(attacks.call_headers(attacks.GENERATE, TOKEN))(number)
        + attacks.frame(attacks.DATA, 0, attacks.stream_of(number), attacks.message(attacks.REQUEST)[:-3])
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("floods"))


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One for each call that the gateway has looked at."""
    seen, looked = list[None](), CallTurns.looked
    monkeypatch.setattr(CallTurns, "looked", lambda turns: (seen.append(None), looked(turns)))
    return seen


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts how gRPC's operations end, on both sides."""
    ends, execute = Counter[str](), cygrpc.execute_batch

    async def counted(*arguments: Any) -> None:
        try:
            await execute(*arguments)
        except BaseException:
            ends["cut off"] += 1
            raise
        ends["whole"] += 1

    monkeypatch.setattr(cygrpc, "execute_batch", counted)
    return ends


def flooding(opened: OpenGateway, frames: attacks.Frames, calls: int = CALLS) -> socket.socket:
    """A connection on which that many calls are sent, in a thread: the gateway may take them slowly."""
    host, _, port = opened.grpc.rpartition(":")
    connection = socket.create_connection((host, int(port)), 60)
    content = GREETING + b"".join(map(frames, range(calls)))
    threading.Thread(target=_send, args=(connection, content), daemon=True).start()
    return connection


def _send(connection: socket.socket, content: bytes) -> None:
    with suppress(OSError):  # the test may be over
        connection.sendall(content)


@pytest.mark.parametrize("kind", FLOODS)
def test_a_call_is_not_behind_all_calls_of_others(model: Path, looks: list[None], kind: str) -> None:
    with open_gateway(model) as opened, Client(opened.grpc) as client, ExitStack() as stack:
        assert client.model_info().vocab_size
        with standing_still(opened):
            for _ in range(2):
                stack.enter_context(flooding(opened, FLOODS[kind]))
            asked = stack.enter_context(ThreadPoolExecutor(1)).submit(client.model_info)
            time.sleep(0.5)  # for the call to be sent, also on a busy machine
        before = len(looks)
        assert asked.result(60).vocab_size
        assert len(looks) - before < CALLS // 4


def test_resets_are_slowed_down(model: Path, looks: list[None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.workers.ports.guarded_port.RESETS", (0.001, 100))
    flood = FLOODS["headers that are reset"]
    with open_gateway(model) as opened, Client(opened.grpc) as client, flooding(opened, flood):
        until(lambda: len(looks) >= 100)
        for _ in range(20):
            assert client.model_info().vocab_size
        assert len(looks) < 200 < CALLS


def test_a_client_that_has_left_is_let_go_before_its_calls_are_through(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.workers.ports.guarded_port.RESETS", (50, 100))
    with open_gateway(model) as opened:
        with flooding(opened, FLOODS["calls that are reset"], 3 * CALLS) as connection:
            until(lambda: any(relay._late for relay in opened.gateway._port._relays))
            connection.shutdown(socket.SHUT_RDWR)
        until(lambda: not opened.gateway._port._relays, 30)  # at 50 a second they would take two minutes


@pytest.mark.parametrize("kind", BROKEN_OFF)
def test_no_operation_of_grpc_is_cut_off_with_its_call(
    model: Path, looks: list[None], batches: Counter[str], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would never be freed."""
    monkeypatch.setattr("tandem.workers.ports.ended_calls.LEFT_SECONDS", 10.0)  # a busy machine may say late who left
    calls, rounds = 300, 3
    with open_gateway(model, {"security.api_key": TOKEN}) as opened:
        for number in range(rounds):
            with flooding(opened, BROKEN_OFF[kind], calls):
                until(lambda number=number: len(looks) == (number + 1) * calls)
            until(lambda: opened.gateway._table.total(Column.CALLS) == 0)
    assert batches["whole"] >= rounds * calls
    assert batches["cut off"] <= rounds * calls // 10


def test_frames_that_bring_nothing_are_slowed_down(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.workers.ports.guarded_port.SMALL_FRAMES", (0.001, 100))
    settings = attacks.frame(attacks.SETTINGS)
    with open_gateway(model) as opened, flooding(opened, lambda _: settings) as connection:
        connection.settimeout(0.5)
        heard = b""
        with suppress(TimeoutError):
            while True:
                heard += connection.recv(1 << 16)
        assert heard.count(attacks.frame(attacks.SETTINGS, attacks.ACK)) <= 100 + 64


def test_one_connection_does_not_hold_all_calls_with_requests_that_do_not_come(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.cluster.frontends.grpc_server.UNREAD_CALLS", 3)
    over = threading.Event()

    def never() -> Iterator[bytes]:
        over.wait(60)
        yield from ()

    with open_gateway(model) as opened, grpc.insecure_channel(opened.grpc) as channel:
        calls: list[Any] = [channel.stream_stream(attacks.GENERATE)(never()) for _ in range(5)]
        until(lambda: sum(call.done() for call in calls) == 2)
        refused = [call for call in calls if call.done()]
        assert Counter(call.code() for call in refused) == {grpc.StatusCode.RESOURCE_EXHAUSTED: 2}
        assert all(RETRY_AFTER_KEY in dict(call.trailing_metadata()) for call in refused)
        local = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(opened.grpc, local) as other:
            method: Any = other.unary_unary(attacks.GENERATE, inference_pb2.GenerateRequest.SerializeToString)
            assert method(build_request(PROMPT, {"max_tokens": 1}, None), timeout=60)
        over.set()


def test_a_host_is_known_by_its_address(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds of hosts, and turns of clients, go by it."""
    hosts = list[str]()
    with open_gateway(model) as opened, Client(opened.grpc) as client:
        opened_bodies = opened.gateway._bodies.open
        monkeypatch.setattr(opened.gateway._bodies, "open", lambda host: (hosts.append(host), opened_bodies(host))[1])
        assert client.model_info().vocab_size
    assert hosts == ["ipv4:127.0.0.1"]


def test_few_connections_are_taken_in_a_turn(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though many wait: over TLS each costs a handshake."""
    made, made_of = Counter[int](), guarded_port._Client.connection_made
    with open_gateway(model, alone=True) as opened, ExitStack() as stack:
        turns, loop = itertools.count(), opened.events._loop

        def turn() -> None:
            made[next(turns)] += 0
            if sum(made.values()) < 100:
                loop.call_soon(turn)

        def counted(client: Any, transport: Any) -> None:
            made[max(made)] += 1
            made_of(client, transport)

        monkeypatch.setattr(guarded_port._Client, "connection_made", counted)
        address = opened.grpc.rpartition(":")
        with standing_still(opened):
            for _ in range(100):
                stack.enter_context(socket.create_connection((address[0], int(address[2]))))
            loop.call_soon_threadsafe(turn)
        until(lambda: sum(made.values()) == 100)
        assert max(made.values()) <= ACCEPTED + 1  # Python 3.13 takes one more than it is told
