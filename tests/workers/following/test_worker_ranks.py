"""Checks how ranks meet on each device, and that their end leaves nobody waiting."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tandem.cache.plan.shard import Shard
from tandem.transfer.island_ranks import MAX_GPU_RANKS
from tandem.transfer.rank_transport import RankTransport
from tandem.transfer.transport import Transport
from tandem.workers.config import Role, WorkerConfig
from tandem.workers.engine.engine import Engine
from tandem.workers.errors import NoRanks
from tandem.workers.following import worker_ranks
from tandem.workers.following.follower import Follower
from tandem.workers.following.leader import Leader
from tandem.workers.following.worker_ranks import WorkerRanks
from tandem.workers.ranks.device_ranks import DeviceRanks, area_bytes
from tandem.workers.ranks.rank_memory import create_memory
from tandem.workers.ranks.shared_ranks import SharedRanks
from tests.workers.following.test_leader import ROWS, FakeEngine, FakeTransport

DEMO = Path(__file__).resolve().parents[3] / "cluster/tools/demo_model/checkpoint"


def ranks_of(rank: int = 0, sizes: tuple[int, ...] = (1, 2), **fields: Any) -> WorkerRanks:
    """Makes the ranks of the second worker of two."""
    where = {
        "island": "island",
        "epoch": 1,
        "pe": 1,
        "num_pes": len(sizes),
        "ranks": sizes,
        "rank": rank,
        "num_signals": ROWS,
    }
    rest: dict[str, Any] = {"role": Role.DECODE, "model_path": str(DEMO), "max_model_len": 64, "token": "", **fields}
    return WorkerRanks(WorkerConfig(**where, **rest))


def test_the_device_decides_how_ranks_meet() -> None:
    assert isinstance(ranks_of(device="cuda").ranks, DeviceRanks)
    assert isinstance(ranks_of(device="cpu").ranks, SharedRanks)
    with pytest.raises(NoRanks, match="has 9 ranks; on GPUs it may have at most 8"):
        DeviceRanks(Shard(0, MAX_GPU_RANKS + 1))


def test_memory_is_budgeted_for_the_shard_with_the_largest_pages() -> None:
    ranks = ranks_of()
    assert ranks.layout.shard.size == 2
    assert ranks.largest_layout.shard.size == 1
    assert ranks.largest_layout.token_bytes == 2 * ranks.layout.token_bytes


def test_gpus_that_do_not_map_each_other_are_named() -> None:
    scratch = {0: 4096, 1: None}
    transport = cast(RankTransport, SimpleNamespace(rank_scratch=scratch.get))
    with pytest.raises(NoRanks, match=r"rank 0 maps no memory of ranks 1; .* need GPUs that are peer to peer"):
        ranks_of(device="cuda")._areas(transport, create_memory(2, 2, ROWS, 4096)[0])


def test_ranks_meet_in_memory_of_their_own_where_the_transport_maps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[Any, ...]] = []

    class FakeAreas:
        def open(self, *arguments: Any) -> list[int]:
            opened.append(arguments)
            return [1, 2]

    monkeypatch.setattr(worker_ranks, "Areas", FakeAreas)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    transport = cast(RankTransport, SimpleNamespace(rank_scratch=lambda rank: None))
    memory = create_memory(2, 2, ROWS, 4096)[0]
    assert ranks_of(1, device="cuda")._areas(transport, memory) == [1, 2]
    assert opened == [(memory, 1, area_bytes(2), worker_ranks.MEET_SECONDS)]


def test_a_follower_that_leaves_makes_the_calls_up_to_its_leaders_last() -> None:
    leads, follows = ranks_of(0), ranks_of(1)
    handle = leads.opened(b"")
    follows.joined([b"", handle, b""])
    assert leads._memory is not None
    assert follows._memory is not None
    lead, follow, transport = FakeEngine(), FakeEngine(), cast(Transport, FakeTransport())
    leads.leader = Leader(leads._memory)
    follows.follower = Follower(cast(Engine, follow), transport, follows._memory, 1)
    for sequence in range(3):
        leads.leader.act(cast(Engine, lead), "free", (sequence,), lambda engine, one: engine.free(one))
    leads.leave()
    follows.leave()
    assert follow.freed == [0, 1, 2]
