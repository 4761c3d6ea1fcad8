"""The pages of a worker: the pages of each pool, the pages of states that may be snapshots, and the pages that the
host keeps."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from torch import Tensor

from tandem import __version__
from tandem.cache.paged_cache import PagedKVCache
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.pool_sizes import (
    PageUse,
    SnapshotRule,
    StateUse,
    num_pages_in,
    num_snapshots,
    pages_of_groups,
)
from tandem.cache.store.copies import PageCopies
from tandem.cache.store.disk.disk_pages import DiskSpace
from tandem.cache.store.disk.folder import folder_name
from tandem.cache.store.disk.page_files import FileShape
from tandem.cache.store.host_store import HostStore
from tandem.cache.store.parked_store import ParkedStore
from tandem.cache.store.tiered_store import TieredStore
from tandem.transfer.machine_memory import machine_memory
from tandem.workers.checkpoint.identity import checkpoint_identity
from tandem.workers.config import WorkerConfig
from tandem.workers.handoff.sequence_room import longest_append
from tandem.workers.ranks.ranks import Ranks, sum_words

HOST_FRACTION = 4  # of its memory
MOST_HOST_BYTES = 64 << 30  # of a worker
PROMPTS_AT_ONCE = 8  # long ones; in what they need, short ones fill as many forwards


def pool_pages(config: WorkerConfig, layout: KVLayout, num_pages: int) -> tuple[int, ...]:
    """Returns the pages of each layer group. Groups that keep all get num_pages. Groups with a window get fewer where
    their window cannot use as many. Groups with states get one for each sequence, and more for snapshots."""
    return pages_of_groups(layout, num_pages, _uses(config), _states(config))


def pages_in(config: WorkerConfig, layout: KVLayout, num_bytes: int) -> int:
    """The most num_pages for which all pools of a worker together have num_bytes; 0 when one is too many."""
    return num_pages_in(layout, num_bytes, _uses(config), _states(config))


def snapshot_rule(config: WorkerConfig, layout: KVLayout, num_pages: int) -> SnapshotRule:
    """Returns the rule by which a worker's forwards take snapshots of states."""
    states = _states(config)
    most = num_snapshots(layout, num_pages, _uses(config), states.share)
    return SnapshotRule(config.state_interval or config.page_size, most, states.drafted)


def host_slots(config: WorkerConfig, layout: KVLayout, num_pages: int) -> tuple[int, ...]:
    """Returns for each layer group the number of pages that fit into a rank's part of config.host_bytes. Groups share
    the bytes as the pools do; of groups with states, pages for snapshots count alone. None fits into fewer than
    host_bytes_needed()."""
    counts = _kept_on_host(config, layout, num_pages)
    num_bytes = (config.host_bytes or 0) // config.island_ranks[config.pe]
    total = sum(count * layout.page_bytes(group) for group, count in enumerate(counts))
    return tuple(num_bytes * count // total for count in counts)


def host_bytes_needed(config: WorkerConfig, layout: KVLayout, num_pages: int) -> int:
    """Returns the fewest host_bytes that hold a page of each layer group."""
    counts = _kept_on_host(config, layout, num_pages)
    total = sum(count * layout.page_bytes(group) for group, count in enumerate(counts))
    return config.island_ranks[config.pe] * max(-(-total // count) for count in counts if count)


def with_host_bytes(config: WorkerConfig, layout: KVLayout, num_pages: int) -> WorkerConfig:
    """Sets host_bytes where the configuration leaves them to the worker. On a GPU host all workers there share a
    quarter of the memory of the machine, or of the worker's control group. Each gets at most MOST_HOST_BYTES, and none
    where it would hold nothing. All ranks and replays find the same, whatever else runs. layout: see host_store."""
    if config.host_bytes is not None or config.device != "cuda":
        return config
    processes = config.workers_on_host or sum(config.island_ranks)
    part = machine_memory() // HOST_FRACTION // processes * config.island_ranks[config.pe]
    num_bytes = min(part, MOST_HOST_BYTES)
    holds = min(_kept_on_host(config, layout, num_pages)) and num_bytes >= host_bytes_needed(config, layout, num_pages)
    return replace(config, host_bytes=num_bytes if holds else 0)


def keep_on_host(
    cache: PagedKVCache,
    config: WorkerConfig,
    layout: KVLayout,
    num_pages: int,
    pools: Sequence[Tensor],
    ranks: Ranks,
    *,
    sharing: bool,
) -> None:
    """Gives a cache the stores in host memory that config asks for; see host_store() and parked_store()."""
    store = host_store(config, layout, num_pages, pools, ranks, cache.layout) if sharing else None
    if store is not None:
        cache.keep_evicted(store)
    if config.parks:
        cache.keep_parked(parked_store(config, layout, num_pages, pools, None if store is None else store.copies))


def host_store(
    config: WorkerConfig,
    layout: KVLayout,
    num_pages: int,
    pools: Sequence[Tensor],
    ranks: Ranks,
    own: KVLayout | None = None,
) -> HostStore | None:
    """Makes a store for evicted prefixes, if config.host_bytes asks for it, with a disk below it if config has one.
    layout: the largest of the island, by which all ranks keep as many pages. own: this rank's layout; None: the
    same. Raises InvalidArgument where the bytes hold too few."""
    own = layout if own is None else own
    if not config.host_bytes:
        return None
    slots = host_slots(config, layout, num_pages)
    least = host_bytes_needed(config, layout, num_pages)
    if config.host_bytes < least:
        raise InvalidArgument(f"cache.host_bytes is {config.host_bytes}; it must be at least {least}")
    agree = partial(sum_words, ranks, device=pools[0].device)
    layers = None if layout.recurs or layout.has_encoder else [group.layers for group in layout.groups]
    options: dict[str, Any] = {"layers": layers, "verify": config.verify_host, "agree": agree, "grows": True}
    if config.disk_path is None:
        return HostStore(pools, slots, **options)
    return TieredStore(pools, slots, disk_space(config, layout, num_pages, own), **options)


def disk_space(config: WorkerConfig, layout: KVLayout, num_pages: int, own: KVLayout) -> DiskSpace:
    """The folder of this rank, and each layer group's part of config.disk_bytes: as host_slots() divides. What is found
    there is used again by workers with the same weights, layout and settings that K and V depend on. own: the layout of
    this rank. Raises InvalidArgument where the bytes hold too few."""
    assert config.disk_path is not None, "the caller asks for it"
    counts, ranks = _kept_on_host(config, layout, num_pages), config.island_ranks[config.pe]
    sizes = [count * layout.page_bytes(group) for group, count in enumerate(counts)]
    given, total = config.disk_bytes or 0, sum(sizes)
    least = ranks * max(
        -(-total * FileShape.least_bytes(layout.page_bytes(group)) // size) for group, size in enumerate(sizes) if size
    )
    if given < least:
        raise InvalidArgument(f"cache.disk_bytes is {given}; it must be at least {least}")
    folder = Path(config.disk_path) / config.island / folder_name(config.pe, config.rank)
    named = frozenset(folder_name(pe, rank) for pe, count in enumerate(config.island_ranks) for rank in range(count))
    return DiskSpace(folder, [given // ranks * size // total for size in sizes], _fingerprint(config, own), named)


def _fingerprint(config: WorkerConfig, layout: KVLayout) -> bytes:
    models = [config.model_path, *filter(None, [config.speculation.draft])]
    weights = [checkpoint_identity(Path(path), config.load_format) for path in models]
    decides = config.dtype, config.kv_cache_dtype, config.k_scale, config.v_scale, config.max_model_len
    parts = __version__, weights, layout.fingerprint, decides, config.speculation.method, config.device
    return blake2b(repr(parts).encode(), digest_size=16).digest()


def parked_store(
    config: WorkerConfig,
    layout: KVLayout,
    num_pages: int,
    pools: Sequence[Tensor],
    copies: PageCopies | None = None,
) -> ParkedStore:
    """Makes a store for parked sequences. Groups share config.parked_bytes as the pools do; groups with states count
    one page for each sequence. layout: the largest of the island, by which all ranks keep as many pages. copies: see
    ParkedStore. Raises InvalidArgument where the bytes hold less than a page of each group. Where sequences take pages
    as they grow, the bytes must hold the pools."""
    counts = pool_pages(config, layout, num_pages)
    counts = [config.max_sequences if of.whole else count for of, count in zip(layout.paging, counts, strict=True)]
    total = sum(count * layout.page_bytes(group) for group, count in enumerate(counts))
    ranks, given = config.island_ranks[config.pe], config.parked_bytes or 0
    least = ranks * (total if config.parking.reserved_output < 1 else max(-(-total // count) for count in counts))
    if given < least:
        raise InvalidArgument(f"cache.parked_bytes is {given}; it must be at least {least}")
    return ParkedStore(pools, [given // ranks * count // total for count in counts], copies)


def _kept_on_host(config: WorkerConfig, layout: KVLayout, num_pages: int) -> list[int]:
    """Returns for each layer group the pages by which the groups share host_bytes."""
    states = num_snapshots(layout, num_pages, _uses(config), _states(config).share)
    counts = pool_pages(config, layout, num_pages)
    return [states if paging.whole else count for paging, count in zip(layout.paging, counts, strict=True)]


def _uses(config: WorkerConfig) -> tuple[PageUse, ...]:
    """Returns the uses of a worker's pools at a time: sequences that it decodes, and prompts that it computes for its
    peers."""
    return (
        PageUse(config.max_sequences, config.max_model_len, longest_append(config.speculation)),
        PageUse(PROMPTS_AT_ONCE, config.max_model_len, config.max_batch_tokens),
    )


def _states(config: WorkerConfig) -> StateUse:
    speculation = config.speculation
    drafted = min(config.max_sequences, speculation.max_step_tokens // 2) if speculation.method != "none" else 0
    return StateUse(config.state_share if config.prefix_sharing and config.state_interval else 0.0, drafted)
