"""Page-to-page push of Qwen3-8B KV between two processes through the TCP transport, over loopback. Prints JSON.

36 layers, 8 KV heads of 128, bf16, page 16: a page is 2.25 MiB. Page tables are random and new in each round, so that
no two pages are neighbours. GB/s are bytes ÷ seconds from the call to its end on the sender, median over the rounds:

    stream  one plain TCP connection, from one contiguous buffer into another, with a byte back at the end
    push    write_slots + quiet; `issue_us` is how long write_slots alone takes
    tls     pushes of the longest prompt over mutual TLS, as between hosts

Streams and pushes take turns, so that what else the machine does meets both. A push has several connections. Where the
cores are busy with other things it gets a larger share of them than a stream does.
"""

import multiprocessing
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from tandem.cache.kinds.kv import KV
from tandem.cache.plan.arrays import Int32Array
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.layout import KVLayout
from tandem.cluster.supervision.authority import Authority
from tandem.transfer.endpoint import LOOPBACK, Endpoint
from tandem.transfer.membership import TransportConfig
from tandem.transfer.tcp.memory import bytes_of
from tandem.transfer.tcp.transport import TcpTransport
from tests.benchmarks.measured import Measured
from tests.benchmarks.options import Budget, add_list, add_seconds, benchmark_parser
from tests.benchmarks.results import at_least, print_result

PAGE = 16
LAYOUT = KVLayout((LayerGroup(tuple(range(36)), KV(8, 128)),), PAGE, torch.bfloat16)
TARGETS = {8192: 0.8}  # of the stream
SENDER, RECEIVER = 0, 1
WARM_UP, ROUNDS = 1, 7


def make_transport(pe: int, num_pages: int, endpoint: Endpoint) -> TcpTransport:
    return TcpTransport(TransportConfig(pe, 2, LAYOUT, (num_pages,), 8, "bench-tcp", 1, endpoint))


def receiver(pipe: Connection) -> None:
    """Obeys: (endpoint, pages) opens and joins, "stream" takes one stream, None ends."""
    endpoint, num_pages = pipe.recv()
    transport = make_transport(RECEIVER, num_pages, endpoint)
    pipe.send(transport.open())
    transport.join(pipe.recv())
    target = bytes_of(transport.pools[0])
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(server.getsockname())
        connection, _ = server.accept()
    with connection:
        while length := pipe.recv():
            view = target[:length]
            while view:
                view = view[connection.recv_into(view, 0, socket.MSG_WAITALL) :]
            connection.sendall(b"1")
    transport.close()


class Pair:
    """This process's transport, joined with one in a process of its own."""

    def __init__(self, num_pages: int, endpoint: Endpoint) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=receiver, args=(theirs,), daemon=True)
        self._process.start()
        self.transport = make_transport(SENDER, num_pages, endpoint)
        self._pipe.send((endpoint, num_pages))
        handles = [self.transport.open(), self._pipe.recv()]
        self._pipe.send(handles)
        self.transport.join(handles)
        self._stream = socket.create_connection(self._pipe.recv())
        self._bytes = bytes_of(self.transport.pools[0])
        self._bytes[:] = bytes(len(self._bytes))  # the kernel gives the memory now

    def stream(self, length: int) -> None:
        self._pipe.send(length)
        self._stream.sendall(self._bytes[:length])
        assert self._stream.recv(1) == b"1"

    def push(self, tables: tuple[Int32Array, Int32Array]) -> tuple[float, float]:
        """Seconds until write_slots returned, and until all was there."""
        began = time.perf_counter()
        self.transport.write_slots(RECEIVER, 0, *tables)
        issued = time.perf_counter() - began
        self.transport.quiet(RECEIVER)
        return issued, time.perf_counter() - began

    def close(self) -> None:
        self._pipe.send(0)
        self._process.join()
        self._stream.close()
        self.transport.close()


def seconds_of(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def random_tables(length: int, num_pages: int, seed: int) -> tuple[Int32Array, Int32Array]:
    rng = np.random.default_rng(seed)
    pages = (rng.permutation(num_pages)[: length // PAGE].astype(np.int32) for _ in range(2))
    source, target = ((some[:, None] * PAGE + np.arange(PAGE, dtype=np.int32)).reshape(-1) for some in pages)
    return source, target


def measure(length: int, endpoint: Endpoint, budget: Budget) -> dict[str, Measured]:
    num_pages, num_bytes = length // PAGE + 8, length * LAYOUT.token_bytes
    pair = Pair(num_pages, endpoint)
    streams, pushes, issues, ratios = [], [], [], []
    for number in budget.within(range(WARM_UP + ROUNDS), least=WARM_UP + 1):
        tables = random_tables(length, num_pages, number)
        stream = seconds_of(lambda: pair.stream(num_bytes))
        issued, push = pair.push(tables)
        issues.append(issued)
        streams.append(num_bytes / stream / 1e9)
        pushes.append(num_bytes / push / 1e9)
        ratios.append(stream / push)
    pair.close()
    return {
        "stream_gb_s": Measured.median(streams[WARM_UP:]),
        "push_gb_s": Measured.median(pushes[WARM_UP:]),
        "issue_us": Measured.median(issues[WARM_UP:], 1e6),
        "of_stream": Measured.median(ratios[WARM_UP:]),
    }


def main() -> None:
    parser = benchmark_parser(__file__, __doc__)
    add_list(parser, "--lengths", int, default=[1024, 8192], help="prompts, in tokens; multiples of 16")
    add_seconds(parser)
    options = parser.parse_args()
    budget = Budget(options.seconds)
    plain = {length: measure(length, LOOPBACK, budget) for length in options.lengths}
    tls = measure(max(options.lengths), Authority("bench").pages("127.0.0.1"), budget)
    result = {
        "lengths": {str(length): numbers for length, numbers in plain.items()},
        "tls": {key: tls[key] for key in ("push_gb_s", "of_stream")},
        "targets": [
            at_least(f"push of {length} tokens, of a plain TCP stream", plain[length]["of_stream"], limit)
            for length, limit in TARGETS.items()
            if length in plain
        ],
    }
    print_result(result, options)


if __name__ == "__main__":
    main()
