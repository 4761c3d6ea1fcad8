"""A worker of several ranks leaves an elastic island, or is lost, and another takes its place; the others go on."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tandem.transfer.errors import MembershipRefused, TransportError
from tandem.transfer.factory import create_transport
from tandem.transfer.membership import TransportConfig, bundle, unbundle
from tandem.transfer.rank_transport import RankTransport, config_below
from tandem.transfer.recall import mailbox_rows
from tests.support.transports import skip_without
from tests.support.waiting import until
from tests.transfer.test_rank_transport import HEADS, LAYERS, PAGE, heads_of, layouts_of

SIZES = 1, 2, 2  # ranks of each worker
ROWS, SIGNAL = 3, 5 << 40 | 17
FIRST, SECOND = 7, 9  # epochs of PE 1
SOURCE = np.arange(2 * PAGE, dtype=np.int32)
WORKERS = [layouts_of(size) for size in SIZES]
Worker = list[RankTransport]


@pytest.fixture(params=["tcp", "nixl"])
def name(request: pytest.FixtureRequest) -> str:
    skip_without(request.param)
    return request.param


def ranks_of(name: str, pe: int, epochs: tuple[int, ...] = ()) -> Worker:
    """Makes the ranks of one worker, which have not opened their memory."""
    rows = mailbox_rows(ROWS, len(SIZES))
    found = []
    for rank, layout in enumerate(WORKERS[pe]):
        epoch = epochs[pe] if epochs else FIRST
        config = TransportConfig(pe, len(SIZES), layout, (8, 8), rows, "ranks", epoch, epochs=epochs)
        found.append(RankTransport(create_transport(name, config_below(config, WORKERS, rank)), WORKERS, pe, rows))
    return found


@pytest.fixture
def island(name: str) -> Iterator[list[Worker]]:
    """Makes an island. A replaced second worker is at the end of the list once more."""
    workers = [ranks_of(name, pe) for pe in range(len(SIZES))]
    handles = [one.open() for ranks in workers for one in ranks]
    for ranks in workers:
        for one in ranks:
            one.join(handles)
    yield workers
    for ranks in workers:
        for one in ranks:
            one.close()


def others_of(island: list[Worker]) -> list[RankTransport]:
    return [*island[0], *island[2]]


def successor(name: str, island: list[Worker]) -> Worker:
    """Makes a worker that takes the place of PE 1, which the others have cut."""
    new = ranks_of(name, 1, (FIRST, SECOND, FIRST))
    island.append(new)
    own, others = [one.open() for one in new], others_of(island)
    offers = [one.offer(1, SECOND) for one in others]
    for one in new:
        one.join([*offers[:1], *own, *offers[1:]])
    for one in others:
        one.reach(1, bundle(own))
        one.admit(1)
    return new


def check_writes(source: Worker, target: Worker, generation: int) -> None:
    """Checks writes: each rank writes its own heads, and the signal counts once all have come."""
    whole, row = torch.randn(8, LAYERS, 2, HEADS, PAGE, 8), 1
    signal = generation << 40 | 17
    for one in source:
        held = heads_of(one.layout)
        one.pools[0].copy_(whole[:, :, :, held.start : held.stop])
        one.write_slots(target[0].pe, 0, SOURCE, SOURCE + 3 * PAGE)
        one.post(target[0].pe, row, signal, 42)
    for one in target:
        until(lambda one=one: one.mailbox()[row].tolist() == [signal, 42])
        held = heads_of(one.layout)
        assert torch.equal(one.pools[0][3:5], whole[:2, :, :, held.start : held.stop])
    for one in source:
        one.quiet(target[0].pe)


def test_what_goes_to_a_lost_worker_is_dropped_on_all_ranks_alike(island: list[Worker]) -> None:
    """The connections of one of its ranks have ended, and only some ranks of the others know it."""
    island[1][1].close()
    second, k = island[2][1], torch.zeros(1, 2, 8)
    until(lambda: second.loss(1))
    assert "PE" in second.lost
    assert not second.loss(0)
    for one in others_of(island):
        heads = k if one.layout.groups[0].num_kv_heads == 2 else torch.zeros(1, HEADS, 8)
        one.write_slots(1, 0, SOURCE, SOURCE)
        one.write_tokens(1, 0, 0, heads, heads, torch.arange(1), torch.arange(1))
        one.post(1, 0, SIGNAL, 1)
    fences = [one.fence(1) for one in others_of(island)]
    for one in others_of(island):
        one.cut(1)
        one.cut(1)
        assert one.lost == ""
    assert all(fence.is_quiet() for fence in fences)
    for one in others_of(island):
        one.write_slots(1, 0, SOURCE, SOURCE)
        one.post(1, 0, SIGNAL, 1)
        assert one.fence(1).is_quiet()
    check_writes(island[0], island[2], 3)
    check_writes(island[2], island[0], 4)


def test_another_worker_takes_the_place(name: str, island: list[Worker]) -> None:
    for one in others_of(island):
        one.cut(1)
    new = successor(name, island)
    pairs = [(island[0], new), (new, island[0]), (island[2], new), (new, island[2]), (island[0], island[2])]
    for generation, (source, target) in enumerate(pairs, 3):
        check_writes(source, target, generation)
    assert {one.lost for one in (*others_of(island), *new)} == {""}
    assert {one.config.all_epochs for one in (*others_of(island), *new)} == {(FIRST, SECOND, FIRST)}


def test_a_worker_of_other_ranks_is_refused(name: str, island: list[Worker]) -> None:
    own = island[0][0]
    own.cut(1)
    assert len(unbundle(own.offer(1, SECOND))) == 2
    new = ranks_of(name, 1, (FIRST, SECOND, FIRST))
    island.append(new)
    with pytest.raises(MembershipRefused, match="PE 1's handle is of 1 ranks; 2 are expected here"):
        own.reach(1, new[0].open())


def test_nobody_is_admitted_whose_offer_was_taken_back(island: list[Worker]) -> None:
    own = island[0][0]
    own.cut(1)
    own.offer(1, SECOND)
    own.cut(1)
    with pytest.raises(TransportError, match="PE 1 has no offer of PE 0: it was taken back, or was never made"):
        own.admit(1)


def test_a_place_of_several_ranks_may_stay_free(name: str) -> None:
    workers = [ranks_of(name, pe, (FIRST, 0, FIRST)) for pe in (0, 2)]
    handles = [one.open() for ranks in workers for one in ranks]
    everybody = [one for ranks in workers for one in ranks]
    try:
        for one in everybody:
            one.join([*handles[:1], b"", b"", *handles[1:]])
        check_writes(workers[0], workers[1], 2)
        assert all(one.fence(1).is_quiet() for one in everybody)
    finally:
        for one in everybody:
            one.close()
