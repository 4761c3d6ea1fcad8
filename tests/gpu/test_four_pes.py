"""The contract of a transport over NVSHMEM among four PEs that write at once, on GPUs of their own or shared."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tandem.cache.kinds.kv import KV
from tandem.cache.plan.arrays import Int32Array
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.layout import KVLayout
from tandem.transfer.completion import pack_signal
from tandem.transfer.membership import TransportConfig
from tests.gpu.pe_pools import Contents, check, copy_slots, fill, put_tokens, wait_for_mail
from tests.gpu.pe_process import NEEDS_NVSHMEM, PeProcess, finish_all, join, pe_processes, together
from tests.transfer.layouts import PAGE_SIZE, two_groups

pytestmark = [pytest.mark.gpu, NEEDS_NVSHMEM]

NUM_PES = 4
SHARE = 4  # pages of every pool that one PE writes into: two as pages and runs, the others token by token
NUM_PAGES = NUM_PES * SHARE
TOKENS = [6, 0, 3]  # rows of what is pushed token by token
# Pages of the first go through the kernel, of the second through copy engines.
LAYOUTS = {
    "small": two_groups(torch.bfloat16),
    "large": KVLayout((LayerGroup((0, 2), KV(256, 128)), LayerGroup((1,), KV(8, 96))), PAGE_SIZE, torch.bfloat16),
}
ISLANDS = {f"{name}-{how}": (layout, how == "mapped") for name, layout in LAYOUTS.items() for how in ("mapped", "puts")}


@pytest.fixture(scope="module")
def processes() -> Iterator[list[PeProcess]]:
    with pe_processes(NUM_PES) as started:
        yield started


@pytest.fixture(scope="module", params=ISLANDS.values(), ids=list(ISLANDS))
def island(request: pytest.FixtureRequest, processes: list[PeProcess]) -> Iterator[list[PeProcess]]:
    """All of them, joined anew in the same processes."""
    layout, mapped = request.param
    config = TransportConfig(0, NUM_PES, layout, (NUM_PAGES,) * 2, num_signals=NUM_PES, island="four", epoch=3)
    join(processes, config, mapped)
    for target in range(NUM_PES):
        assert together(processes, "is_mapped", target) == [mapped or pe == target for pe in range(NUM_PES)]
    yield processes
    together(processes, "call", "close")


def token_slots_of(pe: int) -> Int32Array:
    """Returns the slots of these tokens, in the other pages that PE pe writes."""
    return (pe * SHARE + 2) * PAGE_SIZE + np.array([5, 0, 2], np.int32)


def pages_of(pe: int) -> Int32Array:
    """Slots of the first two pages that PE pe writes into others, but for the last one."""
    return np.arange(pe * SHARE * PAGE_SIZE, (pe * SHARE + 2) * PAGE_SIZE - 1, dtype=np.int32)


def sources_of(pe: int) -> Int32Array:
    """Returns the source slots in a PE's own pools: a page, then a run that begins elsewhere in its page than its
    target."""
    slots = pages_of(pe)
    return np.concatenate([slots[:PAGE_SIZE], slots[PAGE_SIZE:] + 1])


def to_each(island: list[PeProcess], offset: int) -> list[tuple[PeProcess, int]]:
    """Every PE and another, `offset` further."""
    return [(process, (process.pe + offset) % NUM_PES) for process in island]


def push_pages(island: list[PeProcess], expected: list[Contents]) -> None:
    """Pushes pages from each PE to all others. expected: the contents then, if nothing else is written."""
    for offset in range(1, NUM_PES):
        for group in range(2):
            for process, target in to_each(island, offset):
                pe = process.pe
                process.begin("call", "write_slots", target, group, sources_of(pe), pages_of(pe))
                copy_slots(expected[pe][group], expected[target][group], sources_of(pe), pages_of(pe))
            finish_all(island)


def test_all_write_into_all_others_at_once(island: list[PeProcess]) -> None:
    expected = fill(island, 0)
    push_pages(island, expected)
    for offset in range(1, NUM_PES):
        for group, layer in ((0, 0), (0, 1), (1, 0)):
            for process, target in to_each(island, offset):
                process.begin("push_tokens", target, group, layer, process.pe, TOKENS, token_slots_of(process.pe))
            for (process, target), rows in zip(to_each(island, offset), finish_all(island), strict=True):
                put_tokens(expected[target][group], layer, rows, TOKENS, token_slots_of(process.pe))
    for target in range(NUM_PES):
        together(island, "call", "quiet", target)
    check(island, expected)


def test_signals_of_three_senders_come_after_their_data(island: list[PeProcess]) -> None:
    expected = fill(island, 1)
    receiver, senders = island[0], island[1:]
    for sender in senders:
        sender.do("delay")
        for group in range(2):
            sender.do("call", "write_slots", 0, group, sources_of(sender.pe), pages_of(sender.pe))
            copy_slots(expected[sender.pe][group], expected[0][group], sources_of(sender.pe), pages_of(sender.pe))
        sender.do("call", "post", 0, sender.pe, pack_signal(7, sender.pe), -sender.pe)
    for sender in senders:
        mail = wait_for_mail(receiver, sender.pe, pack_signal(7, sender.pe))
        assert int(mail[sender.pe, 1]) == -sender.pe
        pages = slice(sender.pe * SHARE, (sender.pe + 1) * SHARE)
        for landed, wanted in zip(receiver.do("contents"), expected[0], strict=True):
            assert np.array_equal(landed[pages], wanted[pages])
    check(island, expected)
    assert not any(mailbox.any() for mailbox in together(senders, "call", "mailbox"))
    assert not receiver.do("call", "mailbox")[0].any()


def test_a_fifth_pe_is_refused(island: list[PeProcess]) -> None:
    with pytest.raises(RuntimeError, match="InvalidArgument: pe is 4; it must be from 0 to 3"):
        island[2].do("call", "quiet", NUM_PES)
