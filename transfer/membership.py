"""The members of an island: how each PE is configured, and the handles by which PEs find each other."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.layout import KVLayout
from tandem.transfer.endpoint import LOOPBACK, Endpoint
from tandem.transfer.errors import MembershipRefused
from tandem.transfer.regions import Regions, regions_between

HANDLE_BYTES = 4096  # most of a handle, with PEER_BYTES for each PE
PEER_BYTES = 1024

Detail = dict[str, int | str]


@dataclass(frozen=True)
class TransportConfig:
    """One PE of an island, and the shape of the memory of its PEs."""

    pe: int
    num_pes: int
    layout: KVLayout
    num_pages: tuple[int, ...]  # per layer group, in its pool
    num_signals: int  # rows in each mailbox
    island: str
    epoch: int
    endpoint: Endpoint = LOOPBACK  # besides numbers and layouts, the only part that differs between PEs
    layouts: tuple[KVLayout, ...] = ()  # of each PE, shards of one layout; none where all have `layout`
    epochs: tuple[int, ...] = ()  # of each PE, where some have replaced others; none where all have `epoch`
    scratch_bytes: int = 0  # see Transport.scratch
    device: str = "cpu"  # where pools are: on a GPU, "cuda", they are on the device current at open()

    def __post_init__(self) -> None:
        groups = len(self.layout.groups)
        if len(self.num_pages) != groups or min(self.num_pages) < 1:
            raise InvalidArgument(f"num_pages is {self.num_pages}; it must be {groups} numbers of at least 1")
        for name in ("num_pes", "num_signals"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not 0 <= self.pe < self.num_pes:
            raise InvalidArgument(f"pe is {self.pe}; it must be from 0 to {self.num_pes - 1}")
        if self.layouts and (len(self.layouts) != self.num_pes or self.layouts[self.pe] != self.layout):
            raise InvalidArgument(
                f"layouts has {len(self.layouts)} entries; it must have one for each of the {self.num_pes} PEs, that "
                f"of PE {self.pe} being its own"
            )
        if self.epoch < 0:
            raise InvalidArgument(f"epoch is {self.epoch}; it must be at least 0")
        if self.epochs and (len(self.epochs) != self.num_pes or self.epochs[self.pe] != self.epoch):
            raise InvalidArgument(
                f"epochs is {self.epochs}; it must have one for each of the {self.num_pes} PEs, that of PE {self.pe} "
                f"being {self.epoch}"
            )

    def of(self, pe: int) -> "TransportConfig":
        """The same island, as another PE is configured but for its endpoint."""
        layout, epoch = self.layouts[pe] if self.layouts else self.layout, self.all_epochs[pe]
        return self if pe == self.pe else replace(self, pe=pe, layout=layout, epoch=epoch)

    @property
    def all_epochs(self) -> tuple[int, ...]:
        """The epoch of each PE."""
        return self.epochs or (self.epoch,) * self.num_pes

    @property
    def vacant(self) -> frozenset[int]:
        """PEs whose place nobody has: their epoch is 0, and others' are not."""
        return frozenset(pe for pe, epoch in enumerate(self.epochs) if not epoch and pe != self.pe)

    def renewed(self, pe: int, epoch: int) -> "TransportConfig":
        """The same PE once another has begun an epoch of its own. InvalidArgument unless it is a later one."""
        before = self.all_epochs
        if pe == self.pe or epoch <= before[pe]:
            raise InvalidArgument(f"epoch of PE {pe} is {epoch}; it must be later than {before[pe]}, and of a peer")
        return replace(self, epochs=(*before[:pe], epoch, *before[pe + 1 :]))

    @property
    def regions(self) -> list[Regions]:
        """For each PE, the part of its pages that this PE's pages also hold. InvalidArgument where a PE's pages are of
        another layout."""
        return [regions_between(self.layout, theirs) for theirs in self.layouts or (self.layout,) * self.num_pes]


def bundle(handles: Sequence[bytes]) -> bytes:
    """Makes one handle of a worker from its ranks' handles."""
    return b"\n".join(handles)


def unbundle(handle: bytes) -> list[bytes]:
    """Splits a bundle into the handles of its ranks: see bundle()."""
    return handle.split(b"\n")


def make_handle(transport: str, config: TransportConfig, detail: Detail) -> bytes:
    """A PE's island and number, and under `detail` how its transport reaches its memory; for the other PEs."""
    return json.dumps({**_identity(transport, config), "pe": config.pe, "detail": detail}).encode()


def read_handles(transport: str, config: TransportConfig, handles: Sequence[bytes]) -> list[Detail]:
    """The details of PE 0, 1, …, none of a vacant one; MembershipRefused unless all handles are of this island, of
    their PEs' epochs, and of this memory shape."""
    if len(handles) != config.num_pes:
        raise MembershipRefused(f"{len(handles)} handles were given; the island has {config.num_pes} PEs")
    vacant = config.vacant
    return [{} if pe in vacant else read_handle(transport, config, pe, data) for pe, data in enumerate(handles)]


def read_handle(transport: str, config: TransportConfig, pe: int, data: bytes) -> Detail:
    """Returns the details of one PE; see read_handles."""
    most = HANDLE_BYTES + PEER_BYTES * config.num_pes
    if len(data) > most:
        raise MembershipRefused(f"PE {pe}'s handle has {len(data)} bytes; it may have at most {most}")
    return _read_handle(_identity(transport, config.of(pe)) | {"pe": pe}, pe, data)


def _identity(transport: str, config: TransportConfig) -> dict[str, Any]:
    return {
        "transport": transport,
        "island": config.island,
        "epoch": config.epoch,
        "num_pes": config.num_pes,
        "num_pages": list(config.num_pages),
        "num_signals": config.num_signals,
        "scratch_bytes": config.scratch_bytes,
        "kv_cache_dtype": str(config.layout.stored_dtype).removeprefix("torch."),
        "kv_scales": 0 if config.layout.scales is None else config.layout.scales.fingerprint,
        "layout_fingerprint": config.layout.fingerprint,
    }


def _read_handle(expected: dict[str, Any], pe: int, data: bytes) -> Detail:
    try:
        handle = json.loads(data)
    except ValueError as error:
        raise MembershipRefused(f"PE {pe}'s handle is not one that open() returned: {error}") from error
    if not isinstance(handle, dict) or not isinstance(handle.get("detail"), dict):
        raise MembershipRefused(f"PE {pe}'s handle is not one that open() returned: it has no detail")
    for field, value in expected.items():
        if handle.get(field) != value:
            raise MembershipRefused(f"PE {pe}'s handle has {field} {handle.get(field)!r}; {value!r} is expected here")
    return handle["detail"]
