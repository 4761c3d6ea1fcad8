"""PEs in processes of their own, each with a GPU, as NVSHMEM needs them, and a handle on each of them for the tests."""

import multiprocessing
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.cache.position_map import Int32Array
from tandem.transfer.factory import create_transport
from tandem.transfer.membership import TransportConfig

ANSWER_SECONDS = 60.0


class Pe:
    """What a process does on request: every public method, by name. Tensors travel as arrays of bytes."""

    def __init__(self, pe: int) -> None:
        torch.cuda.set_device(pe)
        self.device = torch.device("cuda", pe)

    def open(self, config: TransportConfig) -> bytes:
        self.transport = create_transport("nvshmem", config)
        return self.transport.open()

    def call(self, method: str, *arguments: Any) -> Any:
        """A method of the transport."""
        return getattr(self.transport, method)(*arguments)

    def call_in_new_thread(self, method: str, *arguments: Any) -> Any:
        with ThreadPoolExecutor(1) as executor:
            return executor.submit(self.call, method, *arguments).result()

    def bytes_written(self) -> int:
        return self.transport.bytes_written

    def fill(self, seed: int) -> list[np.ndarray]:
        """Random bits into all pools; what they hold now."""
        generator = torch.Generator().manual_seed(seed)
        for pool in self.transport.pools:
            pool.copy_(torch.randn(pool.shape, generator=generator).to(pool.dtype))
        return self.contents()

    def contents(self) -> list[np.ndarray]:
        return [as_array(pool) for pool in self.transport.pools]

    def are_zero(self) -> bool:
        return not any(pool.any() for pool in self.transport.pools)

    def push_tokens(
        self, target: int, group: int, layer: int, seed: int, indices: list[int], slots: Int32Array, on_gpu: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rows of random k and v, which are then overwritten; what k and v were."""
        shape = (max(indices) + 1, *self._entry(group))
        generator = torch.Generator().manual_seed(seed)
        k, v = (torch.randn(shape, generator=generator).to(self.device, self._dtype) for _ in range(2))
        before = as_array(k), as_array(v)
        rows, places = torch.tensor(indices), torch.from_numpy(slots)
        if on_gpu:
            rows, places = rows.to(self.device), places.to(self.device)
        self.transport.write_tokens(target, group, layer, k, v, rows, places)
        k.fill_(-9)
        v.fill_(-9)
        return before

    def store_into_peer(self, target: int, group: int, page: int) -> None:
        """Own page to the same page of the peer, by a copy on the current stream behind a long kernel."""
        pool = self.transport.peer_pool(target, group)
        assert pool is not None
        torch.cuda._sleep(20_000_000)
        pool[page].copy_(self.transport.pools[group][page])

    def delay(self) -> None:
        torch.cuda._sleep(20_000_000)

    @property
    def _dtype(self) -> torch.dtype:
        return self.transport.layout.dtype

    def _entry(self, group: int) -> tuple[int, int]:
        layers = self.transport.layout.groups[group]
        return layers.num_kv_heads, layers.head_dim


def as_array(values: Tensor) -> np.ndarray:
    """The bits, uint8 [..., bytes of the last extent]."""
    return values.cpu().contiguous().view(torch.uint8).numpy()


class PeProcess:
    """The parent's end; an error there is raised here, by its text."""

    def __init__(self, pe: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, pe), daemon=True)
        self._process.start()
        theirs.close()
        self.pe = pe

    def begin(self, method: str, *arguments: Any) -> None:
        self._connection.send((method, arguments))

    def finish(self) -> Any:
        if not self._connection.poll(ANSWER_SECONDS):
            raise TimeoutError(f"PE {self.pe} did not answer within {ANSWER_SECONDS:g} s")
        result, error = self._connection.recv()
        if error is not None:
            raise RuntimeError(error)
        return result

    def do(self, method: str, *arguments: Any) -> Any:
        self.begin(method, *arguments)
        return self.finish()

    def end(self) -> None:
        self._connection.close()
        self._process.join(10)
        self._process.kill()


def together(processes: list[PeProcess], method: str, *arguments: Any) -> list[Any]:
    """A collective call: all begin before one is waited for."""
    for process in processes:
        process.begin(method, *arguments)
    return [process.finish() for process in processes]


def join(processes: list[PeProcess], config: TransportConfig) -> None:
    for process in processes:
        process.begin("open", TransportConfig(**{**vars(config), "pe": process.pe}))
    handles = [process.finish() for process in processes]
    together(processes, "call", "join", handles)


@contextmanager
def pe_processes(count: int) -> Iterator[list[PeProcess]]:
    processes = [PeProcess(pe) for pe in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
            process.end()


def _serve(connection: Connection, pe: int) -> None:
    state = Pe(pe)
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        try:
            result, error = getattr(state, method)(*arguments), None
        except Exception:
            result, error = None, traceback.format_exc()
        connection.send((result, error))
