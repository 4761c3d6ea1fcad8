"""The memory that a PE registers with NIXL: its pools, and rings through which slots and tokens travel, a ring a peer
each way."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tandem.cache.plan.arrays import Int32Array
from tandem.transfer.errors import TransportError
from tandem.transfer.membership import TransportConfig
from tandem.transfer.nixl.peer import SLOTS, Spans
from tandem.transfer.regions import Region, Regions
from tandem.transfer.tcp.frames import HEADER, MAX_COUNT, Kind, entry_bytes, read_header
from tandem.transfer.tcp.memory import PageMemory

STAGED_BYTES = 256 << 10  # of slots or tokens in a slot of a ring, or one of them where that is more
HEAD_BYTES = 16  # of a header, with which its places begin


class NixlMemory(PageMemory):
    """The pools are where the config says. Rings are on the host, pinned if there is a GPU.

    outbox, inbox: uint8 [num_pes, SLOTS, slot_bytes], what is sent to each PE and what comes from it. A slot of a ring
    holds header, places and values of a frame, as of the TCP transport; the values begin at a multiple of 16.
    """

    def __init__(self, config: TransportConfig) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device()) if config.device == "cuda" else None
        super().__init__(config, () if self.device is None else _device_pools(config, self.device))
        groups = range(len(config.layout.groups))
        largest = max(
            STAGED_BYTES, *(config.of(pe).layout.entry_bytes(group) for pe in range(config.num_pes) for group in groups)
        )
        self.slot_bytes = _aligned(HEAD_BYTES + 4 * MAX_COUNT + largest)
        shape = (config.num_pes, SLOTS, self.slot_bytes)
        self.outbox, self.inbox = (
            torch.zeros(shape, dtype=torch.uint8, pin_memory=self.device is not None) for _ in "oi"
        )

    def count_of(self, kind: Kind, group: int, region: Region | None) -> int:
        """Returns how many slots or tokens fit into a slot of a ring."""
        return min(MAX_COUNT, max(1, STAGED_BYTES // entry_bytes(self.layout, kind, group, region)))

    def stage(
        self, pe: int, slot: int, kind: Kind, group: int, layer: int, places: Int32Array, planes: Sequence[Tensor]
    ) -> int:
        """Fills a slot of the outbox, on a GPU after what is on the current stream; how many bytes it has then.

        places: int32 [n], slots of the receiver. planes: rows for them, contiguous.
        """
        target = self.outbox[pe, slot]
        head = HEADER.pack(kind, group, layer, places.size).ljust(HEAD_BYTES, b"\0") + places.astype("<i4").tobytes()
        target.numpy()[: len(head)] = np.frombuffer(head, np.uint8)
        end = _aligned(len(head))
        for rows in planes:
            begin, end = end, end + rows.nbytes
            target[begin:end].copy_(rows.view(-1).view(torch.uint8), non_blocking=True)
        return end

    def sort_in(self, pe: int, slot: int, num_bytes: int, regions: Regions) -> None:
        """Copies what a peer staged here to its slots, before this returns. TransportError for what no PE sends."""
        if not 0 <= slot < SLOTS or not HEAD_BYTES <= num_bytes <= self.slot_bytes:
            raise TransportError(f"slot {slot} with {num_bytes} bytes; {SLOTS} slots of {self.slot_bytes} bytes exist")
        staged = self.inbox[pe, slot]
        header = read_header(staged[: HEADER.size].numpy().tobytes(), self.layout, regions)
        begin = _aligned(HEAD_BYTES + 4 * header.count)
        size = header.count * entry_bytes(self.layout, header.kind, header.group, regions[header.group])
        if header.kind == Kind.PAGES or begin + size != num_bytes:
            raise TransportError(f"a slot has {num_bytes} bytes of {header}; slots or tokens of {begin + size} do")
        places = np.frombuffer(staged.numpy(), "<i4", header.count, HEAD_BYTES)
        self.check_slots(header.group, places)
        slots = torch.from_numpy(places.astype(np.int64))
        values = staged[begin:num_bytes].view(self.layout.stored_dtype_of(header.group))
        if self.device is not None:
            slots, values = slots.to(self.device), values.to(self.device)
        self.put(header.kind, header.group, header.layer, slots, values, regions[header.group])
        if self.device is not None:
            torch.cuda.current_stream(self.device).synchronize()

    @property
    def kind(self) -> str:
        """NIXL's name for the kind of the pools' memory."""
        return "DRAM" if self.device is None else "VRAM"

    @property
    def device_index(self) -> int:
        return 0 if self.device is None else self.device.index

    def slot_span(self, pe: int, slot: int, num_bytes: int) -> Spans:
        """Returns a span of the outbox."""
        return Spans("DRAM", np.array([[self.outbox[pe, slot].data_ptr(), num_bytes, 0]], np.uint64))


def _device_pools(config: TransportConfig, device: torch.device) -> tuple[Tensor, ...]:
    shapes = [(count, *config.layout.page_shape(group)) for group, count in enumerate(config.num_pages)]
    dtypes = map(config.layout.stored_dtype_of, range(len(shapes)))
    try:
        return tuple(
            torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in zip(shapes, dtypes, strict=True)
        )
    except torch.OutOfMemoryError as error:
        total = sum(math.prod(shape) for shape in shapes)
        raise TransportError(f"num_pages {config.num_pages}, of {total} elements, does not fit the GPU") from error


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 16) * 16
