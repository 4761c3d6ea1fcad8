"""The transports under contract: the fake one, and those registered that a CPU can run."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from tandem.cache.plan.layout import KVLayout
from tandem.transfer.factory import TRANSPORTS, create_transport
from tandem.transfer.membership import TransportConfig
from tandem.transfer.transport import Transport
from tests.support.fake_transport import FakeFabric
from tests.support.transports import skip_without
from tests.transfer.layouts import PAGE_SIZE

NUM_PAGES = 12
NUM_SLOTS = NUM_PAGES * PAGE_SIZE


def pages_of(layout: KVLayout) -> tuple[int, ...]:
    """Returns for each group the pages of NUM_SLOTS slots."""
    return tuple(NUM_SLOTS // paging.entries for paging in layout.paging)


def registered_island(name: str, config: TransportConfig) -> list[Transport]:
    skip_without(name)
    return [create_transport(name, config.of(pe)) for pe in range(config.num_pes)]


def fake_island(config: TransportConfig) -> list[Transport]:
    fabric = FakeFabric(
        config.num_pes,
        config.layouts or config.layout,
        num_pages=config.num_pages,
        num_signals=config.num_signals,
        island=config.island,
        epoch=config.epoch,
    )
    return [fabric.transport(pe) for pe in range(config.num_pes)]


ISLANDS: dict[str, Callable[[TransportConfig], list[Transport]]] = {
    **{name: partial(registered_island, name) for name, one in TRANSPORTS.items() if "cpu" in one.devices},
    "fake": fake_island,
}


def random_tokens(transport: Transport, group: int, count: int, seed: int) -> tuple[Tensor, Tensor | None]:
    layers = transport.layout.groups[group]
    generator = torch.Generator().manual_seed(seed)
    shape = (count, layers.num_kv_heads, layers.head_dim)
    k, v = (torch.randn(shape, generator=generator).to(transport.layout.stored_dtype_of(group)) for _ in range(2))
    return k, v if layers.planes == 2 else None
