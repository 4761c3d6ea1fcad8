"""Values that tell what a cache holds and has room for."""

from typing import NamedTuple


class SequenceState(NamedTuple):
    """The state of one sequence.

    num_tokens: positions appended; a sliding window has evicted some of them. border: positions of its encoder, padding
    included; 0 without an encoder. encoder_len: positions of its encoder without padding. bytes_sent: bytes of
    positions that forwards have sent or were planned to send, without what the receiver's map skips; less again after a
    pop. num_fetched: positions of its first prefix that a store copied back. num_lifted: the part of num_fetched that
    came from a disk.
    """

    num_tokens: int
    border: int
    encoder_len: int
    bytes_sent: int
    num_fetched: int = 0
    num_lifted: int = 0


class PageCounts(NamedTuple):
    """The pages of the scarcest layer group. A page that covers n · page_size positions counts as n.

    free: that can be allocated, also those that only the prefix index uses. A page of a group with a window counts for
    each sequence that uses it: see PageUsers. cached: in the prefix index, used by sequences or not. draining: used by
    nobody, but a remote writer may still hit them.

    Pages of states, each of a whole sequence, count apart: state_pages, free_state_pages as above. snapshots: pages
    that hold a state of an earlier position, for sequences or the prefix index, snapshot_bytes in all.
    evicted_snapshots: snapshots that the prefix index has dropped so far.

    Fields host_… count the store below the prefix index, see StoreCounts: host_bytes is its capacity.
    host_skipped_hits: prompts for which it had pages that were computed, because that took less time than copying them.
    Fields disk_… count the disk below that store, see DiskCounts: disk_bytes is its capacity. disk_skipped_hits: looks
    for a prompt's pages that found reading them slower than computing. Fields parked… count the store of parked
    sequences: their number, its capacity, and the bytes that they take.
    """

    total: int
    free: int
    cached: int
    draining: int
    state_pages: int = 0
    free_state_pages: int = 0
    snapshots: int = 0
    snapshot_bytes: int = 0
    evicted_snapshots: int = 0
    host_bytes: int = 0
    host_bytes_used: int = 0
    host_pages_down: int = 0
    host_pages_up: int = 0
    host_hits: int = 0
    host_bad_pages: int = 0
    host_skipped_hits: int = 0
    disk_bytes: int = 0
    disk_bytes_used: int = 0
    disk_pages_down: int = 0
    disk_pages_up: int = 0
    disk_bad_pages: int = 0
    disk_lost_pages: int = 0
    disk_errors: int = 0
    disk_adopted_pages: int = 0
    disk_skipped_hits: int = 0
    parked: int = 0
    parked_bytes: int = 0
    parked_bytes_used: int = 0


class Room(NamedTuple):
    """The pages that one more sequence would take, for each layer group.

    needed, free, total: pages. has_place: whether there are fewer than max_sequences.
    """

    needed: tuple[int, ...]
    free: tuple[int, ...]
    total: tuple[int, ...]
    has_place: bool

    @property
    def fits(self) -> bool:
        """Whether add_sequence() and reserve() would work now."""
        return self.has_place and all(map(int.__le__, self.needed, self.free))

    @property
    def shortage(self) -> tuple[int, int] | None:
        """Pages needed of a layer group that has fewer in all, and how many it has; None where it can fit one day."""
        return next((pair for pair in zip(self.needed, self.total, strict=True) if pair[0] > pair[1]), None)
