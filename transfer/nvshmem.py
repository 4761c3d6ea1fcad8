"""The transport between GPUs of one host: pools in NVSHMEM symmetric memory, peers' pools mapped and stored into.

    write_slots    copy engines for long runs, a Triton kernel for the rest, on the transport's own stream
    write_tokens   a Triton kernel on the current stream, behind the kernels that made k and v
    quiet          an event behind both
    post           a Triton kernel that stores payload, then signal, with a release at system scope

Importing this module needs nvshmem4py and Triton.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import nvshmem.bindings  # pyright: ignore[reportMissingImports]  # a GPU package, not there where types are checked
import nvshmem.core  # pyright: ignore[reportMissingImports]
import torch
from cuda.core import Device  # pyright: ignore[reportMissingImports]
from torch import Tensor

from tandem.cache.position_map import Int32Array
from tandem.transfer.copy_engine import copy, copy_all
from tandem.transfer.copy_plan import CopyPlan, plan_copy
from tandem.transfer.errors import MembershipRefused, TransportClosed, TransportError, TransportTimeout
from tandem.transfer.kernels.triton_push import post_row, push_slots, push_tokens
from tandem.transfer.membership import Detail, TransportConfig, make_handle, read_handles
from tandem.transfer.transport import Int64Array, Transport

NAME = "nvshmem"
WAIT_SECONDS = 30.0
COPY_ENGINE_BYTES = 1 << 20  # mean length of a run from which copy engines outrun the kernel


class NvshmemTransport(Transport):
    """One PE a process, on the CUDA device current at open(); all PEs on GPUs of one host that reach each other.

    Unlike other transports it makes its memory in join(), and join() and close() are collective: each returns once
    every PE has called it, and whoever runs the island bounds that by ending its processes. A join() that failed for
    another reason than a handle leaves NVSHMEM initialised, so the process has to end; so does a close() that finds a
    peer dead, by NVSHMEM's own doing. After close() another transport can open in the same process, with new members.

    Slots in tensors that are on the GPU are not looked at by the host: one outside the pool is not written to, and the
    next quiet() raises IndexError.
    """

    def __init__(self, config: TransportConfig) -> None:
        super().__init__(config)
        self._unique_id: nvshmem.core.UniqueID | None = None
        self._symmetric: list[Tensor] = []  # own pools, own mailbox: int64 [2, num_signals], signals then payloads
        self._peers: list[list[Tensor]] = []  # [pe], like _symmetric

    def open(self) -> bytes:
        if self._unique_id is not None:
            raise TransportError(f"PE {self.pe} is open already; open() is called once")
        if not torch.cuda.is_available():
            raise TransportError("transport is 'nvshmem'; it needs a CUDA GPU, and torch finds none")
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._unique_id = nvshmem.core.get_unique_id(empty=self.pe != 0)
        detail: Detail = {
            "host": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            "gpu": str(torch.cuda.get_device_properties(self._device).uuid),
        }
        if self.pe == 0:
            detail["unique_id"] = _bytes_of(self._unique_id).tobytes().hex()
        return make_handle(NAME, self.config, detail)

    def join(self, handles: Sequence[bytes]) -> None:
        """See Transport. Blocks until every PE joins; TransportError where a pair of PEs is not peer to peer."""
        if self._unique_id is None:
            raise TransportClosed(f"PE {self.pe} is not open; join() comes after open()")
        details = read_handles(NAME, self.config, handles)
        _check_places(details)
        _bytes_of(self._unique_id)[:] = _unique_id_of(details[0], _bytes_of(self._unique_id).size)
        torch.cuda.set_device(self._device)
        device = Device(self._device.index)
        device.set_current()
        nvshmem.core.init(
            device=device, uid=self._unique_id, rank=self.pe, nranks=self.num_pes, initializer_method="uid"
        )
        self._make_memory()
        self._peers = [self._map(pe) for pe in range(self.num_pes)]
        self._stream, self._mail_stream = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)
        self._ready, self._written, self._read = (torch.cuda.Event() for _ in range(3))
        self._refused = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._mail = torch.zeros(2, self.num_signals, dtype=torch.int64, pin_memory=True)
        self._joined = True

    @property
    def pools(self) -> tuple[Tensor, ...]:
        self._check_peer(self.pe)
        return tuple(self._symmetric[:-1])

    def peer_pool(self, pe: int, group: int) -> Tensor | None:
        self._check_peer(pe)
        return self._peers[pe][group]

    def write_tokens(
        self, pe: int, group: int, layer: int, k: Tensor, v: Tensor, token_indices: Tensor, slots: Tensor
    ) -> None:
        self._check_peer(pe)
        if not slots.shape[0]:
            return
        pool = self._peers[pe][group]
        limit = pool.shape[0] * pool.shape[4]
        if slots.device.type == "cpu" and not 0 <= int(slots.min()) <= int(slots.max()) < limit:
            raise IndexError(f"slots are {int(slots.min())} … {int(slots.max())}; 0 … {limit - 1} are accepted")
        tokens, places = (values.to(self._device, non_blocking=True) for values in (token_indices, slots))
        push_tokens(pool, layer, k, v, tokens, places, self._refused)
        self.bytes_written += 2 * slots.shape[0] * k[0].numel() * k.element_size()

    def write_slots(self, pe: int, group: int, source_slots: Int32Array, target_slots: Int32Array) -> None:
        self._check_peer(pe)
        self._check_slots("source_slots", source_slots)
        self._check_slots("target_slots", target_slots)
        if not source_slots.size:
            return
        page_bytes = self.layout.page_bytes(group)
        plan = plan_copy(source_slots, target_slots, self.layout.page_size)
        sizes = np.multiply(plan.num_pages, page_bytes, dtype=np.int64)
        self._follow_current()
        if int(sizes.sum()) < COPY_ENGINE_BYTES * max(1, sizes.size):
            self._copy_slots(pe, group, source_slots, target_slots)
        else:
            self._copy_pages(pe, group, plan, sizes)
            if plan.source_slots.size:
                self._copy_slots(pe, group, plan.source_slots, plan.target_slots)
        self.bytes_written += source_slots.size * page_bytes // self.layout.page_size

    def quiet(self, pe: int) -> None:
        self._check_peer(pe)
        self._follow_current()
        self._written.record(self._stream)
        self._wait(self._written, f"writes to PE {pe}")
        if self._refused[0]:
            self._refused.zero_()
            raise IndexError(f"slots of a write_tokens() to PE {pe} or another were outside the pool and left out")

    def post(self, pe: int, slot: int, signal: int, payload: int) -> None:
        self._check_peer(pe)
        self._check_signal(slot)
        with torch.cuda.stream(self._stream):
            post_row(self._peers[pe][-1], slot, signal, payload)

    def mailbox(self) -> Int64Array:
        self._check_peer(self.pe)
        self._mail_stream.query()  # binds a new thread to the device, as the driver's own calls do not
        row_bytes = 8 * self.num_signals
        target, source = self._mail.data_ptr(), self._symmetric[-1].data_ptr()
        for begin in (0, row_bytes):  # payloads are read after their signals, as they were written before them
            copy(target + begin, source + begin, row_bytes, self._mail_stream.cuda_stream)
        self._read.record(self._mail_stream)
        self._wait(self._read, "a copy of the mailbox")
        return self._mail.numpy().T.copy()

    def close(self) -> None:
        if not self._joined:
            return
        self._joined = False
        torch.cuda.set_device(self._device)
        torch.cuda.synchronize()
        self._peers = []
        for tensor in self._symmetric:
            nvshmem.core.free_tensor(tensor)
        self._symmetric = []
        nvshmem.core.finalize()

    def _make_memory(self) -> None:
        """Symmetric pools and mailbox, zeroed on every PE when it returns."""
        shapes = [(self.num_pages, *self.layout.page_shape(group)) for group in range(len(self.layout.groups))]
        try:
            self._symmetric = [nvshmem.core.tensor(shape, dtype=self.layout.dtype) for shape in shapes]
            self._symmetric.append(nvshmem.core.tensor((2, self.num_signals), dtype=torch.int64))
        except nvshmem.core.NvshmemError as error:
            raise TransportError(f"num_pages {self.num_pages} does not fit the GPU: {error.msg}") from error
        for tensor in self._symmetric:
            tensor.zero_()
        torch.cuda.synchronize()
        nvshmem.bindings.barrier_all()

    def _map(self, pe: int) -> list[Tensor]:
        if pe == self.pe:
            return self._symmetric
        try:
            return [nvshmem.core.get_peer_tensor(tensor, pe) for tensor in self._symmetric]
        except nvshmem.core.NvshmemError as error:
            raise TransportError(
                f"PE {self.pe} and PE {pe} are not peer to peer; every pair must be: see `nvidia-smi topo -p2p w`"
            ) from error

    def _copy_pages(self, pe: int, group: int, plan: CopyPlan, sizes: Int64Array) -> None:
        page_bytes = self.layout.page_bytes(group)
        targets = np.multiply(plan.target_pages, page_bytes, dtype=np.int64) + self._peers[pe][group].data_ptr()
        sources = np.multiply(plan.source_pages, page_bytes, dtype=np.int64) + self._symmetric[group].data_ptr()
        copy_all(targets, sources, sizes, self._stream.cuda_stream)

    def _copy_slots(self, pe: int, group: int, source_slots: Int32Array, target_slots: Int32Array) -> None:
        with torch.cuda.stream(self._stream):
            slots = (
                torch.from_numpy(values).to(self._device, non_blocking=True) for values in (source_slots, target_slots)
            )
            push_slots(self._symmetric[group], self._peers[pe][group], *slots)

    def _follow_current(self) -> None:
        """What is queued on the transport's stream from now on comes after what is on the current stream."""
        self._ready.record()
        self._stream.wait_event(self._ready)

    def _wait(self, event: torch.cuda.Event, what: str) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not event.query():  # no sleep: the shortest one takes 60 µs
            if time.monotonic() > deadline:
                raise TransportTimeout(f"{what} took more than {WAIT_SECONDS:g} s; they may still land")


def _bytes_of(unique_id: "nvshmem.core.UniqueID") -> np.ndarray:
    return unique_id._data.view(np.uint8)


def _unique_id_of(detail: Detail, num_bytes: int) -> np.ndarray:
    text = str(detail.get("unique_id"))
    try:
        value = np.frombuffer(bytes.fromhex(text), np.uint8)
    except ValueError:
        value = np.empty(0, np.uint8)
    if value.size != num_bytes:
        raise MembershipRefused(f"PE 0's handle has unique_id {text!r:.80}; {num_bytes} bytes in hex are expected")
    return value


def _check_places(details: Sequence[Detail]) -> None:
    """MembershipRefused, the same on every PE, unless all are on one host, each on a GPU of its own."""
    seen: dict[object, int] = {}
    for pe, detail in enumerate(details):
        if detail.get("host") != details[0].get("host"):
            raise MembershipRefused(f"PE 0 and PE {pe} are on different hosts; nvshmem needs one host so far")
        if (other := seen.setdefault(detail.get("gpu"), pe)) != pe:
            raise MembershipRefused(f"PE {other} and PE {pe} have the same GPU {detail.get('gpu')}; one each is needed")
