"""What a rank of a worker with several ranks has besides: its shard, what ranks share, and who leads."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tandem.cache.paged_cache import PagedKVCache
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.shard import WHOLE, Shard
from tandem.transfer.island_ranks import IslandRanks
from tandem.transfer.membership import TransportConfig
from tandem.transfer.rank_transport import RankTransport, config_below
from tandem.transfer.transport import Transport
from tandem.workers.config import WorkerConfig
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.watched_engine import Watcher
from tandem.workers.errors import NoRanks, RankLost
from tandem.workers.following.follower import Follower
from tandem.workers.following.leader import Leader, LeadingEngine
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.drafters.drafter_config import load_drafter_config
from tandem.workers.models.kv_scales import choose_scales
from tandem.workers.models.registry import load_config
from tandem.workers.models.sharding import shard_config
from tandem.workers.ranks.areas import Areas
from tandem.workers.ranks.device_ranks import WAIT_SECONDS, DeviceRanks, area_bytes
from tandem.workers.ranks.rank_memory import RankMemory, attach_memory, create_memory, ring_bytes
from tandem.workers.ranks.ranks import ALONE, Ranks
from tandem.workers.ranks.shared_ranks import SharedRanks
from tandem.workers.runner.model_cache import kv_layout
from tandem.workers.runner.model_runner import ModelRunner

CAPTURES = 2  # that a leader asks for before it serves
POLL_SECONDS = 0.05
FINISH_SECONDS = 10.0  # for a leader's last call
MEET_SECONDS = 120.0  # for a rank on a GPU to offer its memory
MEMORY_END = b"\0"  # between the handle of the ranks' memory and that of the transport
Transports = Callable[[str, TransportConfig], Transport]


class WorkerRanks:
    """The ranks of a worker, seen from one process. If every worker of the island has one rank, this changes
    nothing."""

    def __init__(self, config: WorkerConfig) -> None:
        """Raises NoRanks."""
        self._config = config
        self.shard = Shard(config.rank, self._sizes[config.pe])
        self._whole = load_config(Path(config.model_path), config.dtype)
        self._whole_drafter = load_drafter_config(config.speculation, self._whole)
        self.model, self.drafter, self.layout = self._parts(self.shard)
        self._shared: SharedRanks | DeviceRanks | None = None
        if self.shard.size > 1:
            self._shared = DeviceRanks(self.shard) if config.device == "cuda" else SharedRanks(self.shard)
        self._joining: RankTransport | None = None
        self._mapped: Areas | None = None
        self._memory: RankMemory | None = None
        self._fd = -1
        self.leader: Leader | None = None
        self.follower: Follower | None = None

    def rejoin(self, config: WorkerConfig) -> None:
        """Takes the process's place in the island's next epoch, after leave(). Its shard stays."""
        self._config = config
        assert self.shard == Shard(config.rank, self._sizes[config.pe]), "a process keeps its shard"

    @property
    def ranks(self) -> Ranks:
        """The ranks that the model's layers sum over."""
        return self._shared or ALONE

    @property
    def largest_layout(self) -> KVLayout:
        """The layout of the shard with the largest pages in the island. Where memory is symmetric, all ranks take as
        much."""
        return self._parts(Shard(0, min(self._sizes)))[2]

    @property
    def follows(self) -> bool:
        return self.shard.rank > 0

    @property
    def lost(self) -> str:
        """Why this worker cannot go on; empty while it can. From any thread."""
        memory = self._memory
        failed = "" if memory is None else memory.why_failed(self.shard.rank)
        return next((one.lost for one in (self.leader, self.follower) if one is not None), "") or failed

    def transport(self, make: Transports, config: TransportConfig) -> Transport:
        """config: as workers count PEs."""
        name, sizes = self._config.transport, self._sizes
        if not sizes.has_several:
            return make(name, config)
        of_sizes = {size: [self._parts(Shard(rank, size))[2] for rank in range(size)] for size in set(sizes)}
        workers = [of_sizes[size] for size in sizes]
        scratch = area_bytes(max(sizes)) if self._config.device == "cuda" else 0
        below = make(name, config_below(config, workers, self.shard.rank, scratch))
        self._joining = RankTransport(below, workers, config.pe, config.num_signals)
        return self._joining

    def opened(self, handle: bytes) -> bytes:
        """Returns the handle of this PE's memory. The leader's also has the handle of the memory that ranks share."""
        if self.shard.size == 1 or self.follows:
            return handle
        self._memory, self._fd, own = create_memory(*self._extent)
        return own + MEMORY_END + handle

    @staticmethod
    def of_transport(handle: bytes) -> bytes:
        """Returns the transport's handle, from a handle that opened() gave, or from a bundle of the handles of a
        worker's ranks."""
        return handle.rpartition(MEMORY_END)[2]

    def joined(self, handles: Sequence[bytes]) -> list[bytes]:
        """Takes the handles of all ranks, as opened() gives them or as peers offer them. Returns the handles of their
        transports. Raises RankLost."""
        leads = handles[self._sizes.process(self._config.pe)]
        if self.follows:
            self._memory = attach_memory(leads.partition(MEMORY_END)[0], *self._extent)
        if isinstance(self._shared, SharedRanks) and self._memory is not None:
            self._shared.attach(self._memory.sums)
        return [self.of_transport(one) for one in handles]

    def engine(
        self, cache: PagedKVCache, runner: ModelRunner, transport: Transport, watcher: Watcher | None
    ) -> Engine | None:
        """None for one rank by itself. watcher: sees the actions of a leader. Raises NoRanks."""
        if self._memory is None:
            return None
        if isinstance(self._shared, DeviceRanks) and self._joining is not None:
            self._shared.attach(self._memory.sums, self._areas(self._joining, self._memory), WAIT_SECONDS)
        if not self.follows:
            self.leader = Leader(self._memory)
            token_bytes = self._parts(WHOLE)[2].token_bytes
            return LeadingEngine(cache, runner, transport, self.leader, self.ranks, token_bytes, watcher)
        engine = Engine(cache, runner, transport, self.ranks)
        self.follower = Follower(engine, transport, self._memory, self.shard.rank)
        return engine

    def wait_for_captures(self, seconds: float) -> None:
        """Waits until this follower has captured as many graphs as its leader. Raises RankLost."""
        follower, deadline = self.follower, time.monotonic() + seconds
        assert follower is not None, "engine() comes first"
        while follower.captures < CAPTURES:
            if follower.lost or time.monotonic() > deadline:
                raise RankLost(follower.lost or f"the leader has prepared nothing for {seconds:g} s")
            time.sleep(POLL_SECONDS)

    def leave(self) -> None:
        """Releases what the ranks share, after the end of the step thread. Idempotent."""
        if self.leader is not None:
            self.leader.close()
        if self.follower is not None:
            self.follower.finish(FINISH_SECONDS)
        if self._shared is not None:
            self._shared.detach()
        if self._mapped is not None:
            self._mapped.close()
        self.leader = self.follower = self._memory = self._joining = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _areas(self, transport: RankTransport, memory: RankMemory) -> list[int]:
        """Returns the memory areas in which this worker's ranks meet: areas that the transport maps, else memory of
        their own. NoRanks where their GPUs do not map each other's memory. Raises RankLost."""
        areas = [transport.rank_scratch(rank) for rank in range(self.shard.size)]
        if areas[self.shard.rank] is None:
            torch.cuda.current_stream().synchronize()  # binds this thread to the device, as the driver's calls do not
            self._mapped = self._mapped or Areas()
            return self._mapped.open(memory, self.shard.rank, area_bytes(self.shard.size), MEET_SECONDS)
        mapped = [area for area in areas if area is not None]
        if len(mapped) < len(areas):
            apart = ", ".join(str(rank) for rank, area in enumerate(areas) if area is None)
            raise NoRanks(
                f"the GPU of rank {self.shard.rank} maps no memory of ranks {apart}; the ranks of a worker need GPUs "
                "that are peer to peer"
            )
        return mapped

    @property
    def _sizes(self) -> IslandRanks:
        return self._config.island_ranks

    def _parts(self, shard: Shard) -> tuple[ModelConfig, ModelConfig | None, KVLayout]:
        """The shard's part of the model, of what drafts for it, and of their pages."""
        model, drafter = shard_config(self._whole, shard), self._whole_drafter
        drafter = None if drafter is None else shard_config(drafter, shard)
        scales = choose_scales(self._config, model, drafter)
        return model, drafter, kv_layout(model, self._config.page_size, scales, drafter)

    @property
    def _extent(self) -> tuple[int, int, int, int]:
        config = self._config
        return self.shard.size, config.num_pes, config.num_signals, ring_bytes(config.max_model_len)
