"""How many pages each pool of a worker has, and how many of those with states may be snapshots."""

from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.pool_sizes import (
    PageUse,
    SnapshotRule,
    StateUse,
    num_pages_in,
    num_snapshots,
    pages_of_groups,
)
from tandem.workers.config import WorkerConfig
from tandem.workers.handoff.reservations import longest_append

PROMPTS_AT_ONCE = 8  # long ones; in what they need, short ones fill as many forwards


def pool_pages(config: WorkerConfig, layout: KVLayout, num_pages: int) -> tuple[int, ...]:
    """Of each layer group, with num_pages of those that keep all. Groups with a window get fewer where their window
    cannot use as many; groups with states one for each sequence, and those for snapshots."""
    return pages_of_groups(layout, num_pages, _uses(config), _states(config))


def pages_in(config: WorkerConfig, layout: KVLayout, num_bytes: int) -> int:
    """The most num_pages for which all pools of a worker together have num_bytes; 0 when one is too many."""
    return num_pages_in(layout, num_bytes, _uses(config), _states(config))


def snapshot_rule(config: WorkerConfig, layout: KVLayout, num_pages: int) -> SnapshotRule:
    """When forwards of a worker take snapshots of states."""
    states = _states(config)
    most = num_snapshots(layout, num_pages, _uses(config), states.share)
    return SnapshotRule(config.state_interval or config.page_size, most, states.drafted)


def _uses(config: WorkerConfig) -> tuple[PageUse, ...]:
    """What a worker holds at a time: sequences that it decodes, and prompts that it computes for its peers."""
    return (
        PageUse(config.max_sequences, config.max_model_len, longest_append(config.speculation)),
        PageUse(PROMPTS_AT_ONCE, config.max_model_len, config.max_batch_tokens),
    )


def _states(config: WorkerConfig) -> StateUse:
    speculation = config.speculation
    drafted = min(config.max_sequences, speculation.max_step_tokens // 2) if speculation.method != "none" else 0
    return StateUse(config.state_share if config.prefix_sharing and config.state_interval else 0.0, drafted)
