"""A digest of stored KV by which sender and receiver compare what one wrote into the other's pages."""

from collections.abc import Callable
from itertools import count

import torch
from torch import Tensor

from tandem.cache.paged_cache import PagedKVCache
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.shard import HeldNumbers

DIGEST_BITS = 31
POSITIONS_AT_A_TIME = 1024  # bounds the copies of a long sequence
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # by bytes of an element


def digest_kv(
    cache: PagedKVCache,
    sequence: int,
    begin: int,
    end: int,
    slides: tuple[int, int] | None = None,
    add_up: Callable[[int], int] = int,
) -> int:
    """31 bits of the KV of positions begin … end - 1 in all layers, bit for bit, but for pages that a window no longer
    shows to position `end`; runs on the pages' device. slides: the window and sink of a sequence that begins to slide
    at `end`, at the receiver. add_up: the sum of what all ranks of the worker give it, modulo 2⁶⁴.

    Σ word · weight(column) · weight(position) modulo 2⁶⁴, of which the upper half is taken: as quick as a sum, in any
    order. Weights are odd and differ, so the digest changes with one wrong word, or when two words change places.
    Columns count over all ranks. If several ranks hold a column, the first weighs it.
    """
    total: Tensor | int = 0
    layout, numbers, border = cache.layout, _group_numbers(cache.layout), cache.sequence(sequence).border
    for index, (group, paging) in enumerate(zip(layout.groups, layout.paging, strict=True)):
        held = _held_by(layout, index)
        if not held:
            continue
        seen = max(paging.num_entries(begin), layout.first_wanted(index, end))
        stop = paging.num_entries(end)
        if group.keeps.given:
            stop = min(stop, border)
        else:
            seen = max(seen, border)
        parts = [range(seen, stop)]
        if slides is not None and end > slides[0]:
            parts = [range(seen, slides[1]), range(max(seen, end - (slides[0] - slides[1])), end)]
        pieces = (
            part[at : at + POSITIONS_AT_A_TIME] for part in parts for at in range(0, len(part), POSITIONS_AT_A_TIME)
        )
        for first, last in ((piece.start, piece.stop) for piece in pieces):
            gathered = cache.gather_group(sequence, index, first, last)
            beside = layout.num_layers * numbers[index]
            for layer, (k, v) in zip(group.layers, gathered, strict=True):
                salt = 2 * (beside + layer)
                for one in held:
                    total = total + _weigh(k, first, salt, one) + _weigh(v, first, salt + 1, one)
    return add_up(int(total) & (1 << 64) - 1) >> 32 & (1 << DIGEST_BITS) - 1


def _group_numbers(layout: KVLayout) -> list[int]:
    """Returns 0 for each group, or a number of its own where its layers also stand in another group."""
    more = count(1)
    return [0 if group.kind.attended else next(more) for group in layout.groups]


def _held_by(layout: KVLayout, index: int) -> list[HeldNumbers]:
    """Returns the numbers of a group's entry that count in this rank's digest."""
    kind, shard = layout.groups[index].kind, layout.shard
    sharers = shard.size if kind.whole_on_ranks else kind.replicas
    count = kind.num_kv_heads * kind.head_dim
    held = kind.held(shard) or (HeldNumbers(0, shard.rank // sharers * count, count, sharers),)
    return [one for one in held if shard.rank % one.sharers == 0]


def _weigh(entries: Tensor, position: int, salt: int, held: HeldNumbers) -> Tensor:
    """int64 []: of entries [n, heads, dim] that stand at `position` … ."""
    words = entries.reshape(entries.shape[0], -1).view(WORDS[entries.element_size()])
    words = words[:, held.begin : held.begin + held.count].long()
    columns = _weights((salt << 32) + held.whole, words.shape[1], words.device)
    positions = _weights(position, words.shape[0], words.device)
    return ((words * columns).sum(1) * positions).sum()


def _weights(begin: int, count: int, device: torch.device) -> Tensor:
    """int64 [count], odd: a mix of begin, begin + 1, … by splitmix64's constants."""
    mixed = torch.arange(begin + 1, begin + 1 + count, device=device) * -0x61C8864680B583EB
    mixed = (mixed ^ mixed >> 30) * -0x40A7B892E31B1A47
    return (mixed ^ mixed >> 27) | 1
