"""The contract of a transport, over NVSHMEM: two processes, each with a GPU, or with a share of the only one."""

import json
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from tandem.cache.kinds.kv import KV
from tandem.cache.kinds.latent import Latent
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.kv_scales import KVScales
from tandem.cache.plan.layout import KVLayout
from tandem.transfer.completion import SignalBoard, pack_signal
from tandem.transfer.copy_plan import plan_copy
from tandem.transfer.membership import TransportConfig
from tests.gpu.pe_pools import check, copy_slots, fill, put_tokens, wait_for_mail
from tests.gpu.pe_process import NEEDS_NVSHMEM, PeProcess, join, pe_processes, together
from tests.transfer.layouts import PAGE_SIZE, latents_beside_kv, two_groups

pytestmark = [
    pytest.mark.gpu,
    NEEDS_NVSHMEM,
]

NUM_PAGES = 12
NUM_SLOTS = NUM_PAGES * PAGE_SIZE
FLOAT32, BF16 = torch.float32, torch.bfloat16
# Small pages, of 1 KiB and less, go through the kernel, pages of 1 MiB through copy engines.
LAYOUTS = {
    "small-float32": two_groups(FLOAT32),
    "small-bfloat16": two_groups(BF16),
    "small-fp8": two_groups(BF16, KVScales.uniform(3)),
    "small-latents": latents_beside_kv(),
    "large-bfloat16": KVLayout((LayerGroup((0, 2), KV(256, 128)), LayerGroup((1,), KV(8, 96))), PAGE_SIZE, BF16),
    "large-fp8": KVLayout(
        (LayerGroup((0, 2), KV(512, 128)), LayerGroup((1,), KV(16, 96))), PAGE_SIZE, BF16, KVScales.uniform(3)
    ),
    # Entries as DeepSeek's.
    "large-latents": KVLayout(
        (LayerGroup(tuple(range(240)), Latent(576, 512)), LayerGroup((240,), Latent(320, 256))),
        PAGE_SIZE,
        BF16,
    ),
}
# Every layout over mapped peers, and over puts.
ISLANDS = {f"{name}-{how}": (layout, how == "mapped") for name, layout in LAYOUTS.items() for how in ("mapped", "puts")}


@pytest.fixture(scope="module")
def processes() -> Iterator[list[PeProcess]]:
    with pe_processes(2) as started:
        yield started


@pytest.fixture(scope="module", params=ISLANDS.values(), ids=list(ISLANDS))
def mapped(request: pytest.FixtureRequest, processes: list[PeProcess]) -> Iterator[bool]:
    """Joins an island anew, in the same processes; whether its peers are mapped."""
    layout, mapped = request.param
    join(processes, TransportConfig(0, 2, layout, (NUM_PAGES,) * 2, num_signals=4, island="gpu", epoch=7), mapped)
    assert all(together(processes, "are_zero"))
    assert not any(mail.any() for mail in together(processes, "call", "mailbox"))
    yield mapped
    together(processes, "call", "close")
    together(processes, "call", "close")


@pytest.fixture
def island(processes: list[PeProcess], mapped: bool) -> list[PeProcess]:
    assert together(processes, "is_mapped", 0) == [True, mapped]
    assert together(processes, "is_mapped", 1) == [mapped, True]
    return processes


@pytest.mark.parametrize("target", [0, 1], ids=["self", "peer"])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_tokens_land_bit_for_bit_and_nowhere_else(island: list[PeProcess], target: int, dtype: type) -> None:
    expected = fill(island, 0)
    indices, slots = [6, 0, 3, 4, 5], np.array([0, 47, 17, 18, 30], dtype)
    for group, layer in ((0, 0), (0, 1), (1, 0)):
        rows = island[0].do("push_tokens", target, group, layer, 10 * group + layer, indices, slots)
        put_tokens(expected[target][group], layer, rows, indices, slots)
    island[0].do("call", "quiet", target)
    check(island, expected)


def test_tokens_of_many_calls_take_turns_in_the_staging(island: list[PeProcess], mapped: bool) -> None:
    if mapped:
        pytest.skip("only puts go by way of it")
    expected = fill(island, 0)
    one = island[0].do("push_tokens", 0, 0, 0, 1, [0], np.zeros(1, np.int32))
    expected[0] = island[0].do("contents")
    island[0].do("shrink_staging", 3 * sum(plane.nbytes for plane in one))  # three tokens of the larger group
    for group, layer in ((0, 0), (0, 1), (1, 0)):
        slots = np.arange(layer, 40 + layer, 5, dtype=np.int32)
        indices = list(range(slots.size))
        rows = island[0].do("push_tokens", 1, group, layer, layer, indices, slots)
        put_tokens(expected[1][group], layer, rows, indices, slots)
    island[0].do("call", "quiet", 1)
    check(island, expected)


@pytest.mark.parametrize("target", [0, 1], ids=["self", "peer"])
def test_slots_land_bit_for_bit_and_nowhere_else(island: list[PeProcess], target: int) -> None:
    expected = fill(island, 3)
    # a run of whole pages, an aligned run with both edges, a run at another offset; sources are apart from targets
    source = np.concatenate([np.arange(0, 8), np.arange(9, 18), np.arange(20, 23)]).astype(np.int32)
    where = np.concatenate([np.arange(40, 48), np.arange(25, 34), np.arange(37, 40)]).astype(np.int32)
    plan = plan_copy(source, where, PAGE_SIZE, NUM_SLOTS)
    assert plan.num_pages.tolist() == [2, 1]
    assert plan.source_slots.size == 8
    for group in range(2):
        island[0].do("call", "write_slots", target, group, source, where)
        copy_slots(expected[0][group].copy(), expected[target][group], source, where)
    island[0].do("call", "quiet", target)
    check(island, expected)


def test_pages_in_random_order(island: list[PeProcess]) -> None:
    expected = fill(island, 5)
    rng = np.random.default_rng(0)
    source, where = (
        (rng.permutation(NUM_PAGES)[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).reshape(-1).astype(np.int32)
        for _ in range(2)
    )
    for group in range(2):
        island[1].do("call", "write_slots", 0, group, source, where)
        copy_slots(expected[1][group], expected[0][group], source, where)
    island[1].do("call", "quiet", 0)
    check(island, expected)


def test_stores_of_own_kernels_are_covered_by_quiet(island: list[PeProcess], mapped: bool) -> None:
    if not mapped:
        pytest.skip("there are none into peers that are not mapped")
    expected = fill(island, 9)
    island[0].do("store_into_peer", 1, 0, 5)
    island[0].do("call", "quiet", 1)
    expected[1][0][5] = expected[0][0][5]
    check(island, expected)


def test_writes_of_nothing_change_nothing(island: list[PeProcess]) -> None:
    expected = fill(island, 1)
    none = np.empty(0, np.int32)
    island[0].do("call", "write_slots", 1, 0, none, none)
    island[0].do("push_tokens", 1, 0, 0, 0, [0], none)
    island[0].do("call", "quiet", 1)
    check(island, expected)


def test_a_signal_comes_with_its_payload_and_after_the_data(island: list[PeProcess]) -> None:
    board = SignalBoard(4)
    held = [board.acquire() for _ in range(4)]
    rows, generations = (np.array([getattr(signal, name) for signal in held]) for name in ("row", "generation"))
    expected = fill(island, 2)
    everything = np.arange(NUM_SLOTS, dtype=np.int32)
    mail = np.zeros((4, 2), np.int64)
    for signal in held:
        island[0].do("delay")
        for group in range(2):
            island[0].do("call", "write_slots", 1, group, everything, everything)
        tokens = 100 + signal.row
        island[0].do("call", "post", 1, signal.row, pack_signal(signal.generation, tokens), -(2**40) - signal.row)
        mail = wait_for_mail(island[1], signal.row, pack_signal(signal.generation, tokens))
        assert int(mail[signal.row, 1]) == -(2**40) - signal.row
        check(island, [expected[0], expected[0]])
    assert SignalBoard.landed(mail, rows, generations).tolist() == [100, 101, 102, 103]
    assert not island[0].do("call", "mailbox").any()
    board.release(held[0])
    again = board.acquire()  # what stands in its row is of the earlier use
    assert SignalBoard.landed(mail, np.array([again.row]), np.array([again.generation])).tolist() == [0]
    mail[:] = 7  # a copy
    assert int(island[1].do("call", "mailbox")[0, 0]) == pack_signal(held[0].generation, 100)


def test_a_fence_is_quiet_once_what_came_before_it_has_landed(island: list[PeProcess]) -> None:
    expected = fill(island, 8)
    slots = np.arange(8, 20, dtype=np.int32)
    island[0].do("delay")
    for group in range(2):
        island[0].do("call", "write_slots", 1, group, slots, slots)
        copy_slots(expected[0][group], expected[1][group], slots, slots)
    island[0].do("fence", 1)
    deadline = time.monotonic() + 10
    while not all(island[0].do("fences_are_quiet")):
        assert time.monotonic() < deadline
    check(island, expected)


def test_a_forward_does_not_wait_for_its_push(island: list[PeProcess]) -> None:
    expected = fill(island, 12)
    slots = np.arange(8, 20, dtype=np.int32)
    assert island[0].do("run_beside_a_push", 1, 0, slots)
    copy_slots(expected[0][0], expected[1][0], slots, slots)
    island[0].do("call", "quiet", 1)
    check(island, expected)


def test_layers_go_as_they_are_stored(island: list[PeProcess], mapped: bool, request: pytest.FixtureRequest) -> None:
    """Ten pages of 1 MiB in one run, and a part of another."""
    if not mapped or "large-bfloat16" not in request.node.name:
        pytest.skip("only copies of long runs go in parts")
    expected = fill(island, 13)
    source, where = np.arange(0, 10 * PAGE_SIZE + 3, dtype=np.int32), np.arange(PAGE_SIZE, 11 * PAGE_SIZE + 3)
    assert island[0].do("write_while_storing", 1, 0, source, where.astype(np.int32))
    island[0].do("call", "quiet", 1)
    expected[0] = island[0].do("contents")
    copy_slots(expected[0][0], expected[1][0], source, where.astype(np.int32))
    check(island, expected)


def test_a_payload_may_be_a_tensor(island: list[PeProcess], mapped: bool) -> None:
    assert island[0].do("post_of_tensor", 1, 2, pack_signal(4, 4), 2**31 + 7) == mapped
    assert wait_for_mail(island[1], 2, pack_signal(4, 4))[2, 1] == 2**31 + 7


def test_a_post_to_oneself(island: list[PeProcess]) -> None:
    island[1].do("call", "post", 1, 3, pack_signal(9, 9), 5)
    assert wait_for_mail(island[1], 3, pack_signal(9, 9))[3, 1] == 5


def test_any_thread_may_be_the_one(island: list[PeProcess]) -> None:
    expected = fill(island, 6)
    slots = np.arange(4, 12, dtype=np.int32)
    for group in range(2):
        island[0].do("call_in_new_thread", "write_slots", 1, group, slots, slots)
        copy_slots(expected[0][group], expected[1][group], slots, slots)
    island[0].do("call_in_new_thread", "quiet", 1)
    check(island, expected)
    island[0].do("call_in_new_thread", "post", 1, 2, pack_signal(3, 8), 5)
    wait_for_mail(island[1], 2, pack_signal(3, 8))
    assert island[1].do("call_in_new_thread", "mailbox")[2].tolist() == [pack_signal(3, 8), 5]


def test_what_is_out_of_range_is_refused(island: list[PeProcess]) -> None:
    expected = fill(island, 4)
    for bad in (np.array([-1, 0], np.int32), np.array([0, NUM_SLOTS], np.int32)):
        with pytest.raises(RuntimeError, match="InvalidArgument: target_slots are"):
            island[0].do("call", "write_slots", 1, 0, np.array([2, 3], np.int32), bad)
        with pytest.raises(RuntimeError, match="IndexError: slots are"):
            island[0].do("push_tokens", 1, 0, 0, 0, [0, 1], bad)
    with pytest.raises(RuntimeError, match="InvalidArgument: pe is 2; it must be from 0 to 1"):
        island[0].do("call", "quiet", 2)
    with pytest.raises(RuntimeError, match="InvalidArgument: row is 4; it must be from 0 to 3"):
        island[0].do("call", "post", 1, 4, 1, 1)
    check(island, expected)


def test_handles_of_others_are_refused_before_anything_is_mapped(processes: list[PeProcess]) -> None:
    config = TransportConfig(0, 2, two_groups(), (NUM_PAGES,) * 2, num_signals=4, island="gpu", epoch=8)
    handles = [process.do("open", replace(config, pe=process.pe), True) for process in processes]
    other = json.loads(handles[1])
    for field, change, message in (
        ("epoch", 9, "PE 1's handle has epoch 9"),
        ("detail", {**other["detail"], "host": "elsewhere"}, "PE 0 and PE 1 are on different hosts"),
    ):
        changed = json.dumps({**other, field: change}).encode()
        with pytest.raises(RuntimeError, match=f"MembershipRefused: {message}"):
            processes[0].do("call", "join", [handles[0], changed])
    with pytest.raises(RuntimeError, match="TransportClosed"):
        processes[0].do("call", "mailbox")
    together(processes, "call", "close")
