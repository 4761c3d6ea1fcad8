"""PEs in processes of their own, as NVSHMEM needs them, and a handle on each of them for the tests.

Each has a GPU, which it shares with others where there are fewer. As many use each GPU: where they do not, NVSHMEM's
first collective never ends.
"""

import ctypes
import importlib.util
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.cache.plan.arrays import Int32Array
from tandem.cache.plan.stored_layers import StoredLayers
from tandem.transfer.membership import TransportConfig
from tandem.transfer.transport import Fence

# Without it, whoever asks whether there are GPUs fixes which ones this process sees, and CUDA_VISIBLE_DEVICES of a PE
# comes too late.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
NEEDS_NVSHMEM = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("nvshmem") is None,
    reason="needs a CUDA device and nvshmem4py",
)
PR_SET_PDEATHSIG = 1
ANSWER_SECONDS = 300.0  # a worker's first kernels are compiled


class Pe:
    """Calls that a process makes on request: every public method, by name. Tensors travel as arrays of bytes."""

    def __init__(self, pe: int) -> None:
        self.device = torch.device("cuda", gpu_of(pe))
        torch.cuda.set_device(self.device)

    def open(self, config: TransportConfig, peer_access: bool) -> bytes:
        from tandem.transfer.nvshmem.transport import NvshmemTransport

        self.transport = NvshmemTransport(config, peer_access=peer_access)
        self.fences: list[Fence] = []
        return self.transport.open()

    def call(self, method: str, *arguments: Any) -> Any:
        """A method of the transport."""
        return getattr(self.transport, method)(*arguments)

    def call_in_new_thread(self, method: str, *arguments: Any) -> Any:
        with ThreadPoolExecutor(1) as executor:
            return executor.submit(self.call, method, *arguments).result()

    def is_mapped(self, target: int) -> bool:
        return self.transport.peer_pool(target, 0) is not None

    def shrink_staging(self, num_bytes: int) -> None:
        self.transport._puts._staging = self.transport._puts._staging[:num_bytes]

    def fence(self, target: int) -> bool:
        """Makes another fence; whether it is quiet at once."""
        self.fences.append(self.transport.fence(target))
        return self.fences[-1].is_quiet()

    def fences_are_quiet(self) -> list[bool]:
        return [fence.is_quiet() for fence in self.fences]

    def run_beside_a_push(self, target: int, group: int, slots: Int32Array) -> bool:
        """Whether work queued after write_slots ends before the write does, which waits for a long kernel."""
        self.transport.write_slots(target, group, slots, slots)
        torch.zeros(1, device=self.device)
        self.transport.quiet(target)  # kernels are loaded when first launched, which waits for all that runs
        with torch.cuda.stream(self.transport._stream):
            torch.cuda._sleep(200_000_000)
        self.transport.write_slots(target, group, slots, slots)
        fence = self.transport.fence(target)
        torch.zeros(1, device=self.device)
        torch.cuda.current_stream().synchronize()
        return not fence.is_quiet()

    def write_while_storing(self, target: int, group: int, source_slots: Int32Array, target_slots: Int32Array) -> bool:
        """write_slots of pages whose layers are written one by one, the last after a long kernel; another such kernel
        follows. Whether all layers but that were there before it was stored."""
        pool, peer = self.transport.pools[group], self.transport.peer_pool(target, group)
        assert peer is not None
        own_page, peer_page = (int(slots[0]) // pool.shape[4] for slots in (source_slots, target_slots))
        stored, look = StoredLayers(pool.shape[1]), torch.cuda.Stream()
        *_, (_, before), (_, last) = stored.stages
        for cycles in (0, 200_000_000):  # what is launched for the first time is loaded, which waits for all that runs
            self.transport.quiet(target)
            final = torch.rand_like(pool, dtype=torch.float32).to(pool.dtype)
            for layer in range(pool.shape[1]):
                if layer == pool.shape[1] - 1:
                    torch.cuda._sleep(cycles)
                pool[:, layer] = final[:, layer]
                stored.note(layer)
            torch.cuda._sleep(cycles // 10)
            self.transport.write_slots(target, group, source_slots, target_slots, stored.stages)
            with torch.cuda.stream(look):
                look.wait_event(before)
                while not torch.equal(peer[peer_page, :-1].cpu(), final[own_page, :-1].cpu()) and not last.query():
                    pass
        return not last.query()

    def post_of_tensor(self, target: int, slot: int, signal: int, payload: int) -> bool:
        """Posts a payload that a kernel after a long one makes, and another then writes over; whether it returned
        before."""
        word = torch.zeros((), dtype=torch.int64, device="cuda")
        early = False
        for before, cycles in ((1, 0), (0, 200_000_000)):  # first, what is launched for the first time is loaded
            torch.cuda._sleep(cycles)
            word.fill_(payload - before)
            self.transport.post(target, slot, signal - before, word)
            early = not torch.cuda.current_stream().query()
            word.zero_()
        return early

    def soil_pinned_memory(self, value: int) -> None:
        """Small pieces that the driver gives out next hold this int."""
        from cuda.bindings import driver  # pyright: ignore[reportMissingImports]  # comes with nvshmem4py

        words = 128
        pieces = [driver.cuMemHostAlloc(4 * words, 0)[1] for _ in range(4096)]
        for number, piece in enumerate(pieces):
            (ctypes.c_int * words).from_address(int(piece))[:] = [value] * words
            if number % 64:  # the rest keeps the driver's chunks
                driver.cuMemFreeHost(piece)

    def fill(self, seed: int) -> list[np.ndarray]:
        """Random bits into all pools; what they hold now."""
        generator = torch.Generator().manual_seed(seed)
        for pool in self.transport.pools:
            pool.copy_(torch.randn(pool.shape, generator=generator).to(pool.dtype))
        return self.contents()

    def contents(self) -> list[np.ndarray]:
        return [as_array(pool) for pool in self.transport.pools]

    def are_zero(self) -> bool:
        return not any(pool.view(torch.uint8).any() for pool in self.transport.pools)

    def push_tokens(
        self, target: int, group: int, layer: int, seed: int, indices: list[int], slots: Int32Array
    ) -> list[np.ndarray]:
        """Rows of random k and, where the group has two planes, v, which are then overwritten; what they were."""
        entry = self.transport.layout.groups[group]
        shape = (max(indices) + 1, entry.num_kv_heads, entry.head_dim)
        generator = torch.Generator().manual_seed(seed)
        planes = [torch.randn(shape, generator=generator).to(self.device, self._dtype) for _ in range(entry.planes)]
        before = [as_array(plane) for plane in planes]
        k, v = planes[0], planes[1] if entry.planes == 2 else None
        self.transport.write_tokens(target, group, layer, k, v, torch.tensor(indices), torch.from_numpy(slots))
        for plane in planes:
            plane.fill_(-9)
        return before

    def store_into_peer(self, target: int, group: int, page: int) -> None:
        """Own page to the same page of the peer, by a copy on the current stream after a long kernel."""
        pool = self.transport.peer_pool(target, group)
        assert pool is not None
        torch.cuda._sleep(20_000_000)
        pool[page].copy_(self.transport.pools[group][page])

    def delay(self) -> None:
        torch.cuda._sleep(20_000_000)

    @property
    def _dtype(self) -> torch.dtype:
        return self.transport.layout.stored_dtype


def gpu_of(pe: int) -> int:
    return pe % torch.cuda.device_count()


def gpus_for(num_pes: int) -> list[str]:
    """Returns the names, in CUDA_VISIBLE_DEVICES, of as many GPUs of this process as can have equally many PEs."""
    there = max(1, torch.cuda.device_count())
    used = next(count for count in range(min(there, num_pes), 0, -1) if num_pes % count == 0)
    return [name_of_gpu(index) for index in range(used)]


def name_of_gpu(index: int) -> str:
    """Returns the name, in CUDA_VISIBLE_DEVICES, of the index-th GPU that this process may use."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return names.split(",")[index] if names else str(index)


def as_array(values: Tensor) -> np.ndarray:
    """The bits, uint8 [..., bytes of the last extent]."""
    return values.cpu().contiguous().view(torch.uint8).numpy()


class PeProcess:
    """The parent's end of a process that has a `kind`; an error there is raised here, by its text."""

    def __init__(self, pe: int, kind: Callable[[int], object] = Pe, num_pes: int = 1) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, kind, pe, num_pes), daemon=True)
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
    return finish_all(processes)


def finish_all(processes: list[PeProcess]) -> list[Any]:
    """Waits for all, then raises what the first of them raised: none is left with an answer that nobody has read."""
    results, errors = [], []
    for process in processes:
        try:
            results.append(process.finish())
        except RuntimeError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return results


def join(processes: list[PeProcess], config: TransportConfig, peer_access: bool) -> None:
    for process in processes:
        process.begin("open", replace(config, pe=process.pe), peer_access)
    handles = finish_all(processes)
    together(processes, "call", "join", handles)


@contextmanager
def pe_processes(count: int, kind: Callable[[int], object] = Pe) -> Iterator[list[PeProcess]]:
    processes = [PeProcess(pe, kind, count) for pe in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
            process.end()


def _serve(connection: Connection, kind: Callable[[int], object], pe: int, num_pes: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # also within a collective that never ends
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus_for(num_pes))
    state = kind(pe)
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
