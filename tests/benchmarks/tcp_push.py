"""Page-to-page push of Qwen3-8B KV between two processes through TCP or NIXL, over loopback. Prints JSON.

36 layers, 8 KV heads of 128, bf16, page 16: a page is 2.25 MiB. Page tables are random and new in each round, so that
no two pages are neighbours. GB/s are bytes ÷ seconds from the call to its end on the sender, median over the rounds:

    stream  one plain TCP connection, from one contiguous buffer into another, with a byte back at the end
    push    write_slots + quiet; `issue_us` is how long write_slots alone takes
    post    half of the time from a post until the receiver, which reads its mailbox all the time, has posted back
    plain   one NIXL write of the same pages by an agent that does nothing else; NIXL alone
    tls     pushes of the longest prompt over mutual TLS, as between hosts; TCP alone

`--transports tcp,nixl` measures both, and `--transports nixl --device cuda` pages of GPUs, of two where there are
two. Streams, pushes and
transports take turns, so that what else the machine does meets all of them. A push over TCP has several connections.
Where the cores are busy with other things it gets a larger share of them than a stream does.
"""

import multiprocessing
import socket
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from tandem.cache.kinds.kv import KV
from tandem.cache.plan.arrays import Int32Array
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.layout import KVLayout
from tandem.transfer.endpoint import LOOPBACK, Endpoint
from tandem.transfer.factory import create_transport
from tandem.transfer.membership import TransportConfig
from tandem.transfer.tcp.memory import bytes_of
from tandem.transfer.transport import Transport
from tests.benchmarks import nixl_writes
from tests.benchmarks.measured import Measured, rounded
from tests.benchmarks.options import Budget, add_list, add_seconds, benchmark_parser
from tests.benchmarks.results import at_least, print_result

PAGE = 16
LAYOUT = KVLayout((LayerGroup(tuple(range(36)), KV(8, 128)),), PAGE, torch.bfloat16)
TARGETS = {8192: 0.8}  # of the stream
SENDER, RECEIVER = 0, 1
WARM_UP, ROUNDS = 1, 7
POSTS = 50
PLAIN = "plain"
NIXL_TARGET = 0.8  # of plain writes


def make_transport(name: str, pe: int, num_pages: int, endpoint: Endpoint, device: str) -> Transport:
    if device == "cuda":
        torch.cuda.set_device(pe % torch.cuda.device_count())
    config = TransportConfig(pe, 2, LAYOUT, (num_pages,), 8, "bench-push", 1, endpoint, device=device)
    return create_transport(name, config)


def streamed_bytes(transport: Transport) -> memoryview:
    """The pool, or where a GPU has it as many bytes of the host."""
    pool = transport.pools[0]
    return bytes_of(torch.empty_like(pool, device="cpu") if pool.is_cuda else pool)


def wait_for(transport: Transport, signal: int) -> None:
    """A post of the peer's, in row 0."""
    while int(transport.mailbox()[0, 0]) != signal:
        time.sleep(0)


def receiver(pipe: Connection) -> None:
    """Opens and joins as told. Then it obeys numbers: n > 0 takes a stream of n bytes, n < 0 posts back -n times, 0
    ends. PLAIN: plain writes come."""
    name, endpoint, num_pages, device = pipe.recv()
    transport = make_transport(name, RECEIVER, num_pages, endpoint, device)
    pipe.send(transport.open())
    transport.join(pipe.recv())
    target = streamed_bytes(transport)
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(server.getsockname())
        connection, _ = server.accept()
    with connection:
        while length := pipe.recv():
            if length == PLAIN:
                plain_seconds(RECEIVER, transport, pipe, [])
                continue
            for number in range(1, 1 - length):
                wait_for(transport, number)
                transport.post(SENDER, 0, number, number)
            if length < 0:
                wait_for(transport, -1)
                continue
            view = target[:length]
            while view:
                view = view[connection.recv_into(view, 0, socket.MSG_WAITALL) :]
            connection.sendall(b"1")
    transport.close()


def plain_seconds(
    pe: int, transport: Transport, pipe: Connection, tables: Sequence[tuple[Int32Array, Int32Array]]
) -> list[float]:
    """Returns the seconds of a NIXL write of each table's pages from the sender's pool into the receiver's."""

    def exchange(value: Any) -> list[Any]:
        pipe.send(value)
        peers = pipe.recv()
        return [value, peers] if pe == SENDER else [peers, value]

    pool = transport.pools[0]
    with nixl_writes.connected(pe, pool.view(pool.shape[0], -1), 1, 0, exchange) as side:
        pages = [(source[::PAGE] // PAGE, target[::PAGE] // PAGE) for source, target in tables]
        return [seconds_of(lambda pair=pair: side.write(*pair, b"")) for pair in pages]


class Pair:
    """This process's transport, joined with one in a process of its own."""

    def __init__(self, name: str, num_pages: int, endpoint: Endpoint, device: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=receiver, args=(theirs,), daemon=True)
        self._process.start()
        self.transport = make_transport(name, SENDER, num_pages, endpoint, device)
        self._pipe.send((name, endpoint, num_pages, device))
        handles = [self.transport.open(), self._pipe.recv()]
        self._pipe.send(handles)
        self.transport.join(handles)
        self._stream = socket.create_connection(self._pipe.recv())
        self._bytes = streamed_bytes(self.transport)
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

    def plain(self, tables: Sequence[tuple[Int32Array, Int32Array]]) -> list[float]:
        """Seconds of each write by NIXL alone."""
        self._pipe.send(PLAIN)
        return plain_seconds(SENDER, self.transport, self._pipe, tables)

    def posts(self) -> list[float]:
        """Seconds of each there and back, halved."""
        self._pipe.send(-POSTS)
        took = []
        for number in range(1, POSTS + 1):
            began = time.perf_counter()
            self.transport.post(RECEIVER, 0, number, number)
            wait_for(self.transport, number)
            took.append((time.perf_counter() - began) / 2)
        self.transport.post(RECEIVER, 0, -1, 0)
        return took

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


def measure(
    names: Sequence[str], length: int, endpoint: Endpoint, budget: Budget, device: str = "cpu"
) -> dict[str, dict[str, float]]:
    """Measures each transport. They take turns."""
    num_pages, num_bytes = length // PAGE + 8, length * LAYOUT.token_bytes
    pairs = {name: Pair(name, num_pages, endpoint, device) for name in names}
    rows: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
    for number in budget.within(range(WARM_UP + ROUNDS), least=WARM_UP + 1):
        tables = random_tables(length, num_pages, number)
        for name, pair in pairs.items():
            stream = seconds_of(lambda pair=pair: pair.stream(num_bytes))
            rows[name].append((stream, *pair.push(tables)))
    posts = {name: pair.posts() for name, pair in pairs.items()}
    found = {name: _numbers(num_bytes, rows[name][WARM_UP:], posts[name]) for name in names}
    if "nixl" in pairs:
        seconds = pairs["nixl"].plain([random_tables(length, num_pages, number) for number in range(WARM_UP + ROUNDS)])
        plain = Measured.median([num_bytes / each / 1e9 for each in seconds[WARM_UP:]])
        found["nixl"] |= {"plain_gb_s": plain, "of_plain": rounded(found["nixl"]["push_gb_s"] / plain)}
    for pair in pairs.values():
        pair.close()
    return found


def _numbers(num_bytes: int, rows: Sequence[tuple[float, float, float]], posts: list[float]) -> dict[str, float]:
    return {
        "stream_gb_s": Measured.median([num_bytes / stream / 1e9 for stream, _, _ in rows]),
        "push_gb_s": Measured.median([num_bytes / push / 1e9 for _, _, push in rows]),
        "issue_us": Measured.median([issued for _, issued, _ in rows], 1e6),
        "of_stream": Measured.median([stream / push for stream, _, push in rows]),
        "post_us": Measured.median(posts, 1e6),
    }


def main() -> None:
    parser = benchmark_parser(__file__, __doc__)
    add_list(parser, "--lengths", int, default=[1024, 8192], help="prompts, in tokens; multiples of 16")
    add_list(parser, "--transports", str, default=["tcp"], help="of tcp and nixl, which take turns")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where pages are; cuda: by nixl")
    add_seconds(parser)
    options = parser.parse_args()
    budget, device = Budget(options.seconds), options.device
    measured = {length: measure(options.transports, length, LOOPBACK, budget, device) for length in options.lengths}
    result: dict[str, Any] = {"targets": []}
    if "tcp" in measured[options.lengths[0]]:
        from tandem.cluster.supervision.authority import Authority  # what it needs may be missing on a GPU host

        plain = {length: numbers["tcp"] for length, numbers in measured.items()}
        tls = measure(["tcp"], max(options.lengths), Authority("bench").pages("127.0.0.1"), budget)["tcp"]
        result = {
            "lengths": {str(length): numbers for length, numbers in plain.items()},
            "tls": {key: tls[key] for key in ("push_gb_s", "of_stream")},
            "targets": [
                at_least(f"push of {length} tokens, of a plain TCP stream", plain[length]["of_stream"], limit)
                for length, limit in TARGETS.items()
                if length in plain
            ],
        }
    others = {name: {str(length): measured[length][name] for length in measured} for name in options.transports}
    others.pop("tcp", None)
    result["targets"] += [
        at_least(f"push of {length} tokens, of a plain NIXL write", numbers["of_plain"], NIXL_TARGET)
        for length, numbers in others.get("nixl", {}).items()
    ]
    print_result(result | others, options)


if __name__ == "__main__":
    main()
