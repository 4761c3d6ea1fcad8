"""The ring of calls: bytes come out as they went in, whatever their lengths, and nobody waits for ever."""

import random

import pytest

from tandem.workers.errors import RankLost
from tandem.workers.ranks.rank_memory import LOST, CallReader, CallWriter, RankMemory, attach_memory, create_memory

RING = 4096


def memory(size: int = 3) -> RankMemory:
    made, _, handle = create_memory(size, 2, 5, RING)
    assert attach_memory(handle, size, 2, 5, RING).token == made.token
    return made


def test_calls_come_in_order_across_the_ends_of_the_ring() -> None:
    shared, chance = memory(), random.Random(1)
    writer, readers = CallWriter(shared, 5.0), [CallReader(shared, rank) for rank in (1, 2)]
    for _ in range(300):
        calls = [chance.randbytes(chance.choice((0, 1, 7, 500, 1200))) for _ in range(chance.randrange(1, 4))]
        for call in calls:
            writer.write(call)
        for reader in readers:
            assert [reader.read() for _ in calls] == calls
            assert reader.read() is None


def test_a_follower_that_reads_nothing_is_waited_for_within_bounds() -> None:
    shared = memory()
    writer, reader = CallWriter(shared, 0.1), CallReader(shared, 1)
    for _ in range(4):
        writer.write(bytes(1000))
        reader.read()  # the other one reads nothing
    with pytest.raises(RankLost, match=r"the followers do not read their calls, for 0.1 s"):
        writer.write(bytes(1000))


def test_a_follower_that_cannot_go_on_is_known_at_the_next_call() -> None:
    shared = memory()
    shared.states[2].set(LOST, 1)
    with pytest.raises(RankLost, match="rank 2 cannot continue"):
        CallWriter(shared, 5.0).write(b"call")


def test_a_call_that_fits_no_ring_is_refused() -> None:
    with pytest.raises(RankLost, match="a call has 4104 bytes; the ranks' memory takes 4096"):
        CallWriter(memory(), 5.0).write(bytes(RING))


def test_the_memory_of_a_leader_that_has_ended_is_not_mapped() -> None:
    with pytest.raises(RankLost, match="the leader's memory cannot be mapped"):
        attach_memory(b'{"pid": 999999999, "fd": 3, "token": ""}', 2, 2, 5, RING)
