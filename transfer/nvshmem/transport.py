"""The transport between GPUs of one host: pools in NVSHMEM symmetric memory.

                   PEs that are peer to peer: mapped           PEs that are not: puts from kernels of ours
    write_slots    copy engines for long runs, a Triton        a put a run of pages, a put a row for the rest
                   kernel for the rest
    write_tokens   a Triton kernel                             a put a row, from a staged copy
    post           a Triton kernel: payload, then signal       quiet, payload, fence, signal
    fence          an event                                    an event after a quiet

write_tokens queues on the current CUDA stream, after the kernels that made k and v. All else queues on a stream of
the transport's own, after what is on the current one. The current one never waits for it: a forward goes on during its
push. With `stages`, write_slots waits for these only: the first layers of long runs go while the last are computed.
Importing this module needs nvshmem4py and Triton; factory.py imports it when it is asked for.
"""

import ctypes
import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import nvshmem.bindings  # pyright: ignore[reportMissingImports]  # a GPU package, not there where types are checked
import nvshmem.core  # pyright: ignore[reportMissingImports]
import torch
from cuda.bindings import driver  # pyright: ignore[reportMissingImports]
from cuda.core import Device, ObjectCode  # pyright: ignore[reportMissingImports]
from torch import Tensor

from tandem.cache.kernels.build.build_once import cache_folder
from tandem.cache.kernels.copy_engine import copy, copy_all, copy_rows
from tandem.cache.kernels.upload import upload
from tandem.cache.plan.arrays import Int32Array
from tandem.cache.plan.stored_layers import Stages
from tandem.transfer.copy_plan import CopyPlan, plan_copy
from tandem.transfer.errors import TransportClosed, TransportError, TransportTimeout
from tandem.transfer.membership import Detail, TransportConfig, make_handle, read_handles
from tandem.transfer.nvshmem.details import bytes_of, check_hosts, unique_id_of
from tandem.transfer.nvshmem.device_puts import STAGING_BYTES, DevicePuts
from tandem.transfer.nvshmem.kernels.device_build import build_device_puts
from tandem.transfer.nvshmem.kernels.triton_push import post_row, push_slots, push_tokens
from tandem.transfer.nvshmem.shard_pages import copy_region
from tandem.transfer.page_pool import PagePool, movable, rows_for
from tandem.transfer.transport import Fence, Int64Array, Transport

NAME = "nvshmem"
MAILBOX_SECONDS = 30.0
CLEARED_PIECES, CLEARED_BYTES = 4096, 512  # more than what small pieces of the process before can have been
COPY_ENGINE_BYTES = 1 << 20  # mean length of a run from which copy engines outrun the kernel
STAGES_BYTES = 8 << 20  # and from which it pays to send its first layers apart: a copy more a run


@dataclass(frozen=True, eq=False)
class EventFence:
    """An event on the transport's stream."""

    event: torch.cuda.Event

    def is_quiet(self) -> bool:
        return self.event.query()


class NvshmemTransport(Transport):
    """One PE a process, on the CUDA device current at open(); all PEs on GPUs of one host.

    PEs may share a GPU, as many on each. Without MPS, NVSHMEM then refuses its collectives except barrier_all, the only
    one used here. It names the memory that PEs of a GPU share after the first PE, so a host has room for one such
    island at a time.

    Unlike other transports it makes its memory in join(). join() and close() are collective: each returns once every PE
    has called it. The island's supervisor bounds that by ending its processes. A join() that fails for another reason
    than a handle leaves NVSHMEM initialised, so the process must end. If close() finds a peer dead, NVSHMEM itself ends
    the process. After close() another transport can open in the same process, with new members.
    """

    def __init__(self, config: TransportConfig, *, peer_access: bool = True) -> None:
        """peer_access False maps no other PE, as if none were peer to peer."""
        super().__init__(config)
        self._peer_access = peer_access
        self._unique_id: nvshmem.core.UniqueID | None = None
        # Own pools (8-bit floats as bytes), own mailbox (int64 [2, num_signals], signals then payloads), staging of
        # DevicePuts.
        self._symmetric: list[Tensor] = []
        self._allocated: list[Tensor] = []  # what these were made of, as large on every PE
        self._peers: list[list[Tensor] | None] = []  # [pe], pools and mailbox; None where not mapped
        self._scratch: list[Tensor | None] = []  # [pe], the same
        self._library: ObjectCode | None = None

    def open(self) -> bytes:
        if self._unique_id is not None:
            raise TransportError(f"PE {self.pe} is open already; open() is called once")
        if not torch.cuda.is_available():
            raise TransportError("transport is 'nvshmem'; it needs a CUDA GPU, and torch finds none")
        self._device = torch.device("cuda", torch.cuda.current_device())
        # No proxy thread, which keeps a core busy, where PEs that are all peer to peer do not need it: without a NIC.
        # The first call reads this.
        os.environ.setdefault("NVSHMEM_DISABLE_LOCAL_ONLY_PROXY", "1")
        self._unique_id = nvshmem.core.get_unique_id(empty=self.pe != 0)
        detail: Detail = {"host": Path("/proc/sys/kernel/random/boot_id").read_text().strip()}
        if self.pe == 0:
            detail["unique_id"] = bytes_of(self._unique_id).tobytes().hex()
        return make_handle(NAME, self.config, detail)

    def join(self, handles: Sequence[bytes]) -> None:
        """See Transport. Blocks until every PE joins. TransportError where puts are needed and cannot be compiled."""
        if self._unique_id is None:
            raise TransportClosed(f"PE {self.pe} is not open; join() comes after open()")
        details = read_handles(NAME, self.config, handles)
        check_hosts(details)
        bytes_of(self._unique_id)[:] = unique_id_of(details[0], bytes_of(self._unique_id).size)
        _in_new_thread(self._initialise)
        torch.cuda.set_device(self._device)
        self._stream, self._mail_stream = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)
        self._ready, self._read = torch.cuda.Event(), torch.cuda.Event()
        self._mail = torch.zeros(2, self.num_signals, dtype=torch.int64, pin_memory=True)
        if None in self._peers:
            self._puts = self._load_puts()
        self._joined = True

    @property
    def pools(self) -> tuple[Tensor, ...]:
        self._check_peer(self.pe)
        pools = enumerate(self._symmetric[: self._num_pools])
        return tuple(pool.view(self.layout.stored_dtype_of(group)) for group, pool in pools)

    def peer_pool(self, pe: int, group: int) -> Tensor | None:
        """See Transport. None also for another shard's, whose pages kernels do not know."""
        peer = None if self._regions[pe][group] is not None else self._peer_elements(pe, group)
        return None if peer is None else peer.view(self.layout.stored_dtype_of(group))

    def scratch(self, pe: int) -> int | None:
        found = self._scratch[pe]
        return None if found is None else found.data_ptr()

    def _peer_elements(self, pe: int, group: int) -> Tensor | None:
        """The peer's pool where it is mapped, in the elements that it was made of."""
        self._check_peer(pe)
        peer = self._peers[pe]
        return None if peer is None else peer[group]

    def write_tokens(
        self, pe: int, group: int, layer: int, k: Tensor, v: Tensor | None, token_indices: Tensor, slots: Tensor
    ) -> None:
        self._check_peer(pe)
        if not slots.shape[0]:
            return
        self._check_token_slots(group, slots)
        region = self._regions[pe][group]
        if region is not None:
            self._write_shard_tokens(pe, group, layer, (k, v), token_indices, slots)
            return
        tokens, targets = upload([token_indices.numpy(), slots.numpy().astype(np.int32)], self._device)
        k, v, peer = movable(k), None if v is None else movable(v), self._peer_elements(pe, group)
        if peer is None:
            self._puts.put_tokens(pe, self._symmetric[group], layer, k, v, tokens, targets)
        else:
            push_tokens(peer, layer, k, v, tokens, targets)

    def write_slots(
        self, pe: int, group: int, source_slots: Int32Array, target_slots: Int32Array, stages: Stages = ()
    ) -> None:
        self._check_peer(pe)
        if not source_slots.size:
            return
        if not stages:
            self._follow_current()  # the device comes to it while the rest is planned
        plan = plan_copy(source_slots, target_slots, self.layout.paging[group].entries, self._num_slots(group))
        peer, region = self._peer_elements(pe, group), self._regions[pe][group]
        if region is not None:
            self._follow(stages[-1:])
            copy_region(self._symmetric[group], self._mapped(pe, group), plan, region, self._stream)
            return
        if peer is not None:
            self._copy_slots(peer, group, plan, source_slots, target_slots, stages)
            return
        self._follow(stages[-1:])
        with torch.cuda.stream(self._stream):
            self._puts.put(pe, self._symmetric[group], plan)

    def _mapped(self, pe: int, group: int) -> Tensor:
        """The pool of a peer of another shard. TransportError where it is not mapped: puts know pages like ours."""
        peer = self._peer_elements(pe, group)
        if peer is None:
            raise TransportError(f"PE {pe} holds another shard and is not peer to peer; only mapped ones are written")
        return peer

    def _write_shard_tokens(
        self,
        pe: int,
        group: int,
        layer: int,
        planes: tuple[Tensor, Tensor | None],
        token_indices: Tensor,
        slots: Tensor,
    ) -> None:
        region = self._regions[pe][group]
        target = None if region is None else region.peer_layer(layer)
        if region is None or target is None:
            return
        tokens, targets = upload([token_indices.numpy(), slots.numpy().astype(np.int64)], self._device)
        keys, values = rows_for(*planes, tokens, region)
        PagePool(self._mapped(pe, group)).put_tokens(target, targets, keys, values, region.peer_heads)

    def fence(self, pe: int) -> Fence:
        self._check_peer(pe)
        self._follow_current()
        if self._peers[pe] is None:
            with torch.cuda.stream(self._stream):
                self._puts.quiet()
        event = torch.cuda.Event()
        event.record(self._stream)
        return EventFence(event)

    def post(self, pe: int, row: int, signal: int, payload: int | Tensor) -> None:
        self._check_peer(pe)
        self._check_row(row)
        peer = self._peers[pe]
        if peer is None:
            word = int(payload)
            self._follow_current()
            with torch.cuda.stream(self._stream):
                self._puts.post_row(pe, row, signal, word)
            return
        # The tensor's owner may write over it before this stream comes to it.
        words = payload + 0 if isinstance(payload, Tensor) else torch.full((), payload, device=self._device)
        words.record_stream(self._stream)
        self._follow_current()
        with torch.cuda.stream(self._stream):
            post_row(peer[self._num_pools], row, signal, words)

    def mailbox(self) -> Int64Array:
        self._check_peer(self.pe)
        self._mail_stream.query()  # binds a new thread to the device, as the driver's own calls do not
        row_bytes = 8 * self.num_signals
        target, source = self._mail.data_ptr(), self._symmetric[self._num_pools].data_ptr()
        for begin in (0, row_bytes):  # payloads are read after their signals, as they were written before them
            copy(target + begin, source + begin, row_bytes, self._mail_stream.cuda_stream)
        self._read.record(self._mail_stream)
        deadline = time.monotonic() + MAILBOX_SECONDS
        while not self._read.query():
            if time.monotonic() > deadline:
                raise TransportTimeout(f"a copy of the mailbox took more than {MAILBOX_SECONDS:g} s")
        return self._mail.numpy().T.copy()

    def close(self) -> None:
        if not self._joined:
            return
        self._joined = False
        _in_new_thread(self._finalise)

    @property
    def _num_pools(self) -> int:
        return len(self.layout.groups)

    def _initialise(self) -> None:
        torch.cuda.set_device(self._device)
        device = Device(self._device.index)
        device.set_current()
        _clear_pinned_memory()
        nvshmem.core.init(
            device=device, uid=self._unique_id, rank=self.pe, nranks=self.num_pes, initializer_method="uid"
        )
        self._make_memory()
        self._peers = [self._map(pe) for pe in range(self.num_pes)]
        self._scratch = [self._map_scratch(pe) for pe in range(self.num_pes)]

    def _finalise(self) -> None:
        torch.cuda.set_device(self._device)
        torch.cuda.synchronize()
        self._peers, self._scratch = [], []
        if self._library is not None:
            del self._puts
            nvshmem.bindings.culibrary_finalize(int(self._library.handle))
            self._library = None
        for tensor in self._allocated:
            nvshmem.core.free_tensor(tensor)
        self._symmetric, self._allocated = [], []
        nvshmem.core.finalize()

    def _make_memory(self) -> None:
        """Symmetric pools, mailbox and staging, zeroed on every PE when it returns."""
        stored = map(self.layout.stored_dtype_of, range(self._num_pools))
        dtypes = [torch.uint8 if dtype.itemsize == 1 else dtype for dtype in stored]
        sizes = [max(math.prod(shapes[group]) for shapes in self._shapes) for group in range(self._num_pools)]
        try:
            self._allocated = [
                nvshmem.core.tensor((size,), dtype=dtype) for size, dtype in zip(sizes, dtypes, strict=True)
            ]
            self._allocated.append(nvshmem.core.tensor((2, self.num_signals), dtype=torch.int64))
            # On every PE, whether it needs it or not: one cannot know which of the others are peer to peer.
            self._allocated.append(nvshmem.core.tensor((STAGING_BYTES,), dtype=torch.uint8))
            if self.config.scratch_bytes:
                self._allocated.append(nvshmem.core.tensor((self.config.scratch_bytes,), dtype=torch.uint8))
        except nvshmem.core.NvshmemError as error:
            raise TransportError(f"num_pages {self.num_pages} does not fit the GPU: {error.msg}") from error
        for tensor in self._allocated:
            tensor.zero_()
        self._symmetric = [*self._shaped(self.pe, self._allocated), *self._allocated[self._num_pools :][:2]]
        torch.cuda.synchronize()
        nvshmem.bindings.barrier_all()

    def _map(self, pe: int) -> list[Tensor] | None:
        if pe == self.pe:
            return self._symmetric
        if not self._peer_access:
            return None
        try:
            mapped = [nvshmem.core.get_peer_tensor(tensor, pe) for tensor in self._allocated[: self._num_pools + 1]]
        except nvshmem.core.NvshmemError:
            return None
        return [*self._shaped(pe, mapped), mapped[-1]]

    def _map_scratch(self, pe: int) -> Tensor | None:
        if not self.config.scratch_bytes or self._peers[pe] is None:
            return None
        return self._allocated[-1] if pe == self.pe else nvshmem.core.get_peer_tensor(self._allocated[-1], pe)

    @property
    def _shapes(self) -> list[list[tuple[int, ...]]]:
        """The shapes of the pools of each PE."""
        layouts = [self.config.of(pe).layout for pe in range(self.num_pes)]
        return [[(count, *one.page_shape(group)) for group, count in enumerate(self.num_pages)] for one in layouts]

    def _shaped(self, pe: int, memory: Sequence[Tensor]) -> list[Tensor]:
        """Views a PE's memory, which may be larger, as its pools."""
        return [one[: math.prod(shape)].view(shape) for one, shape in zip(memory, self._shapes[pe], strict=False)]

    def _load_puts(self) -> DevicePuts:
        cubin = build_device_puts(cache_folder(), torch.cuda.get_device_capability(self._device))
        self._library = library = ObjectCode.from_cubin(cubin.read_bytes())
        nvshmem.bindings.culibrary_init(int(library.handle))
        return DevicePuts(library, *self._symmetric[self._num_pools :])

    def _copy_slots(
        self,
        peer: Tensor,
        group: int,
        plan: CopyPlan,
        source_slots: Int32Array,
        target_slots: Int32Array,
        stages: Stages,
    ) -> None:
        own, page_bytes = self._symmetric[group], self.layout.page_bytes(group)
        sizes = np.multiply(plan.num_pages, page_bytes, dtype=np.int64)
        of_pages = (source_slots.size - plan.source_slots.size) // own.shape[4] * page_bytes
        mean = of_pages // max(1, sizes.size)
        if mean < COPY_ENGINE_BYTES:
            self._follow(stages[-1:])
            self._store_slots(own, peer, source_slots, target_slots)
            return
        targets = np.multiply(plan.target_pages, page_bytes, dtype=np.int64) + peer.data_ptr()
        sources = np.multiply(plan.source_pages, page_bytes, dtype=np.int64) + own.data_ptr()
        stream = self._stream.cuda_stream
        if len(stages) < 2 or mean < STAGES_BYTES:
            self._follow(stages[-1:])
            copy_all(targets, sources, sizes, stream)
        else:
            done, of_layer = 0, page_bytes // len(self.layout.groups[group].layers)
            for num_layers, event in stages:
                self._stream.wait_event(event)
                offset, width = done * of_layer, (num_layers - done) * of_layer
                copy_rows(targets + offset, sources + offset, plan.num_pages, page_bytes, width, stream)
                done = num_layers
        if plan.source_slots.size:
            self._store_slots(own, peer, plan.source_slots, plan.target_slots)

    def _store_slots(self, own: Tensor, peer: Tensor, source_slots: Int32Array, target_slots: Int32Array) -> None:
        with torch.cuda.stream(self._stream):
            push_slots(own, peer, *upload([source_slots, target_slots], self._device))

    def _follow(self, stages: Stages) -> None:
        """Makes work queued on the transport's stream from now on wait for these events."""
        for _, event in stages:
            self._stream.wait_event(event)

    def _follow_current(self) -> None:
        """Makes work queued on the transport's stream from now on wait for the current stream."""
        self._ready.record()
        self._stream.wait_event(self._ready)


def _in_new_thread(call: Callable[[], None]) -> None:
    """NVSHMEM 3.4.5 has a CUDA runtime of its own, which keeps errors by thread. After a second finalize() one that was
    not looked at is left there, and ends the process at the next init() or finalize() in that thread."""
    with ThreadPoolExecutor(1) as executor:
        executor.submit(call).result()


def _clear_pinned_memory() -> None:
    """Zeros in what the driver gives out next. NVSHMEM 3.4.5 does not set the int by which kernels ask for an exit: its
    proxy thread takes a 2 that it finds there for that, and the next call ends the process."""
    pieces = [driver.cuMemHostAlloc(CLEARED_BYTES, 0) for _ in range(CLEARED_PIECES)]
    made = [int(piece) for status, piece in pieces if status == driver.CUresult.CUDA_SUCCESS]
    for piece in made:
        ctypes.memset(piece, 0, CLEARED_BYTES)
    for piece in made:
        driver.cuMemFreeHost(piece)
