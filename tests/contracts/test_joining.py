"""Tests who joins an island, who is refused, and how joining ends."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.kv_scales import KVScales
from tandem.transfer.errors import MembershipRefused, TransportClosed
from tandem.transfer.membership import TransportConfig
from tandem.transfer.transport import Transport
from tests.contracts.islands import ISLANDS, NUM_PAGES, random_tokens, registered_island
from tests.transfer.layouts import PAGE_SIZE, two_groups


def check_closed(transport: Transport) -> None:
    slots = np.arange(2, dtype=np.int32)
    k, v = random_tokens(transport, 0, 2, seed=0)
    for call in (
        lambda: transport.pools,
        lambda: transport.write_slots(1, 0, slots, slots),
        lambda: transport.write_tokens(1, 0, 0, k, v, torch.arange(2), torch.arange(2)),
        lambda: transport.fence(1),
        lambda: transport.quiet(1),
        lambda: transport.post(1, 0, 1, 1),
        lambda: transport.mailbox(),
    ):
        with pytest.raises(TransportClosed, match="has not joined island 'contract', or has left it"):
            call()


def test_nothing_works_before_join(unjoined: list[Transport]) -> None:
    check_closed(unjoined[0])
    unjoined[0].open()
    check_closed(unjoined[0])


def test_close_ends_everything_and_may_be_repeated(island: list[Transport]) -> None:
    island[0].close()
    check_closed(island[0])
    island[0].close()
    slots = np.arange(4, dtype=np.int32)
    island[1].write_slots(2, 0, slots, slots)
    island[1].quiet(2)


@pytest.mark.parametrize("make", ISLANDS.values(), ids=ISLANDS.keys())
def test_groups_have_pools_of_their_own_sizes(make: Callable[[TransportConfig], list[Transport]]) -> None:
    layout = two_groups()
    transports = make(TransportConfig(0, 2, layout, (5, 3), num_signals=4, island="unequal", epoch=1))
    handles = [transport.open() for transport in transports]
    for transport in transports:
        transport.join(handles)
        assert [pool.shape[0] for pool in transport.pools] == [5, 3]
    for group, pages in enumerate((5, 3)):
        last, indices = pages * PAGE_SIZE - 1, torch.tensor([0])
        k, v = random_tokens(transports[0], group, 1, seed=group)
        transports[0].write_tokens(1, group, 0, k, v, indices, torch.tensor([last]))
        transports[0].quiet(1)
        planes = [k[0]] if v is None else [k[0], v[0]]
        assert torch.equal(transports[1].pools[group][-1, 0, :, :, -1], torch.stack(planes))
        with pytest.raises(IndexError):
            transports[0].write_tokens(1, group, 0, k, v, indices, torch.tensor([last + 1]))
        outside = np.array([last + 1], np.int32)
        with pytest.raises(InvalidArgument, match=f"they must be from 0 to {last}"):
            transports[0].write_slots(1, group, outside - 1, outside)
    for transport in transports:
        transport.close()


def test_closing_what_was_never_opened_is_fine(unjoined: list[Transport]) -> None:
    unjoined[0].close()
    unjoined[0].close()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("transport", "pigeon"),
        ("island", "another"),
        ("epoch", 8),
        ("num_pes", 4),
        ("num_pages", [NUM_PAGES, 13]),
        ("num_signals", 5),
        ("layout_fingerprint", 1),
        ("pe", 2),
    ],
)
def test_a_handle_of_another_island_or_shape_is_refused(
    unjoined: list[Transport], field: str, value: int | str | list[int]
) -> None:
    handles = [transport.open() for transport in unjoined]
    changed = json.loads(handles[1]) | {field: value}
    with pytest.raises(MembershipRefused, match=re.escape(f"PE 1's handle has {field} {value!r}; ")):
        unjoined[0].join([handles[0], json.dumps(changed).encode(), handles[2]])
    check_closed(unjoined[0])


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"page_size": 2 * PAGE_SIZE}, "layout_fingerprint"),
        ({"scales": KVScales.uniform(3, k=0.5)}, "kv_"),
    ],
)
def test_another_layout_is_refused(
    unjoined: list[Transport], config: TransportConfig, change: dict[str, Any], field: str
) -> None:
    if "scales" in change and config.layout.scales is None:
        pytest.skip("the layout has no scales")
    layout = replace(config.layout, **change)
    other = registered_island("shared_memory", replace(config, layout=layout))[1]
    handles = [transport.open() for transport in unjoined]
    handle = json.loads(other.open()) | {"transport": json.loads(handles[1])["transport"]}
    with pytest.raises(MembershipRefused, match=f"PE 1's handle has {field}"):
        unjoined[0].join([handles[0], json.dumps(handle).encode(), handles[2]])
    other.close()


@pytest.mark.parametrize("bad", [b"", b"\xff\xfe", b"[]", b"{}", b"3", b" " * 5000])
def test_bytes_that_are_no_handle_are_refused(unjoined: list[Transport], bad: bytes) -> None:
    handles = [transport.open() for transport in unjoined]
    with pytest.raises(MembershipRefused, match="PE 1's handle"):
        unjoined[0].join([handles[0], bad, handles[2]])


def test_a_handle_that_is_too_long_is_refused_unread(unjoined: list[Transport]) -> None:
    handles = [transport.open() for transport in unjoined]
    with pytest.raises(MembershipRefused, match="PE 1's handle has 7169 bytes; it may have at most 7168"):
        unjoined[0].join([handles[0], handles[1].ljust(7169), handles[2]])


def test_too_few_handles_are_refused(unjoined: list[Transport]) -> None:
    handles = [transport.open() for transport in unjoined]
    with pytest.raises(MembershipRefused, match="2 handles were given; the island has 3 PEs"):
        unjoined[0].join(handles[:2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pe": 3}, "pe is 3; it must be from 0 to 2"),
        ({"num_pes": 0}, "num_pes is 0"),
        ({"num_pages": (3, 0)}, r"num_pages is \(3, 0\); it must be 2 numbers"),
        ({"num_pages": (3,)}, r"num_pages is \(3,\); it must be 2 numbers"),
        ({"num_signals": 0}, "num_signals is 0"),
        ({"epoch": -1}, "epoch is -1"),
        ({"epochs": (7, 7)}, "epochs is .*; it must have one for each of the 3 PEs"),
        ({"epochs": (8, 7, 7)}, "that of PE 0 being 7"),
    ],
)
def test_a_config_out_of_range_is_refused(config: TransportConfig, change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        replace(config, **change)
