"""Checks what a paged cache holds, which its caller cannot see: contents position by position, and the users of each
page."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.cache.kinds.compressed import compressed_groups
from tandem.cache.kinds.index import index_keys
from tandem.cache.plan.position_map import SKIP, PositionMap
from tests.cache.known import Known, Side
from tests.cache.oracle import Oracle
from tests.support.tolerances import ARITHMETIC


def check_contents(side: Side, sequence: int, oracle: Oracle) -> None:
    known, transfer = side.known[sequence], side.incoming.get(sequence)
    assert side.cache.num_tokens(sequence) == (transfer.end if transfer else known.length)
    groups = side.cache.layout.groups
    if known.stream is None:
        begin = min(side.cache.first_position(sequence), len(known.ids))
        positions = np.array(
            [*range(len(known.ids)), *(rope_position(known, node) for node in range(len(known.nodes)))]
        )
        begins, ids = [begin] * len(groups), [*known.ids, *known.nodes]
        check_kv(side, oracle, sequence, begins, known.length, ids, positions, known.length)
    else:
        there = [position for position in known.kept if position < len(known.ids)]
        sinks = sum(position < known.stream.sink for position in there)
        query = max(known.queries, transfer.end if transfer else 0)
        recent = there[sinks] if len(there) > sinks else len(known.ids)
        firsts = [index * side.cache.layout.page_size for index in side.first_page_indexes(query)]
        for begin, end in ((0, sinks), (recent, len(known.ids))):
            begins = [min(max(begin, first), end) for first in firsts]
            check_kv(side, oracle, sequence, begins, end, known.ids, np.arange(end), known.stream.rotated)
    if transfer is None and side.cache.layout.drops_past and known.stream is None:
        row, table = side.cache._table.row(sequence), side.cache._table
        assert [int(group.begins[row]) for group in table.groups] == side.first_page_indexes(known.queries)


def rope_position(known: Known, node: int) -> int:
    return len(known.ids) + len(known.path(node)) - 1


def check_kv(
    side: Side,
    oracle: Oracle,
    sequence: int,
    begins: list[int],
    end: int,
    ids: list[int],
    positions: NDArray[np.int64],
    rotated: int,
) -> None:
    """begins: of each group. positions: by which K of the first `rotated` positions is rotated; K of others is not."""
    for layer, (group, index) in side.cache._layers.places.items():
        begin = begins[group]
        wanted, turned = np.array(ids[begin:end], np.int64), max(min(rotated, end) - begin, 0)
        k, v = side.cache.gather_group(sequence, group, begin, end)[index]
        if layer in oracle.shared:
            where = zip(wanted.tolist(), positions[begin:end].tolist(), strict=True)
            expected = np.array([oracle.shared[layer].kept(int(id_), int(at)) for id_, at in where])
            assert_close(k[:, 0], expected.reshape(k[:, 0].shape))
            assert torch.equal(k, v)
            continue
        expected = oracle.rotated_k[layer][wanted[:turned], positions[begin:end][:turned].astype(np.int64)]
        assert_close(k[:turned], expected)
        assert np.array_equal(k[turned:].numpy(), oracle.stored_k[layer][wanted[turned:]])
        assert np.array_equal(v.numpy(), oracle.stored_v[layer][wanted])
    check_beside(side, oracle, sequence, ids, end)
    check_compressed(side, oracle, sequence, ids[:end])
    for layer, (group, index) in index_keys(side.cache.layout).items():
        begin = begins[group]
        keys, _ = side.cache.gather_group(sequence, group, begin, end)[index]
        assert_close(keys, oracle.index[layer].keys[ids[begin:end], positions[begin:end].astype(np.int64)])


def check_beside(side: Side, oracle: Oracle, sequence: int, ids: list[int], end: int) -> None:
    """Checks that entries of groups beside others are there bit for bit, as far back as each group keeps them."""
    layout, row = side.cache.layout, side.cache._table.row(sequence)
    for (group, layer), entries in oracle.beside.items():
        paging, table = layout.paging[group], side.cache._table.groups[group]
        which = range(min(int(table.begins[row]) * paging.entries, end), end // paging.every)
        found = side.cache.gather_group(sequence, group, which.start, max(which.start, which.stop))
        stored = found[layout.groups[group].layers.index(layer)]
        for plane, expected in enumerate(entries.entries(ids, which)):
            assert torch.equal(stored[plane], expected)


def check_compressed(side: Side, oracle: Oracle, sequence: int, ids: list[int]) -> None:
    """Inputs, entries and index keys are there, as far back as their groups keep them."""
    layout, row, tokens = side.cache.layout, side.cache._table.row(sequence), len(ids)
    for layer, of in compressed_groups(layout).items():
        shared, place = oracle.shared[layer], layout.groups[of.inputs].layers.index(layer)
        assert shared.given is not None
        begin = min(int(side.cache._table.groups[of.inputs].begins[row]) * layout.page_size, tokens)
        values, gates = side.cache.gather_group(sequence, of.inputs, begin, tokens)[place]
        index = torch.tensor(ids[begin:], dtype=torch.int64)
        assert_close(values[:, 0], shared.given.values[index].double().numpy())
        assert_close(gates[:, 0], shared.given.gates[index].double().numpy())
        for kind, group in enumerate((of.entries, of.keys)):
            if group is None:
                continue
            expected = shared.entries(ids, kind)
            stored, _ = side.cache.gather_group(sequence, group, 0, len(expected))[
                layout.groups[group].layers.index(layer)
            ]
            assert_close(stored[:, 0], np.array(expected).reshape(stored[:, 0].shape))


def assert_close(actual: Tensor, expected: NDArray[np.float64]) -> None:
    assert are_close(actual, expected).all()


def are_close(actual: Tensor, expected: NDArray[np.float64]) -> NDArray[np.bool_]:
    """bool, of each number."""
    tolerance = ARITHMETIC[torch.float32]
    assert actual.shape == expected.shape
    # Several times as fast as numpy's allclose; NaN is false.
    return np.abs(actual.numpy() - expected) <= tolerance.atol + tolerance.rtol * np.abs(expected)


def check_outputs(outputs: list[Tensor], texts: list[list[int]], seen: list[list[int]], oracle: Oracle) -> None:
    """o of each layer is what the oracle computes, see Oracle.outputs. Where float32 may not tell what an index chooses
    last from what it leaves out first, both are accepted, but the same in all layers."""
    close = rows_close(outputs, oracle.outputs(texts, seen))
    if oracle.index and not close.all():
        close |= rows_close(outputs, oracle.outputs(texts, seen, swapped=True))
    assert close.all()


def rows_close(outputs: list[Tensor], expected: list[NDArray[np.float64]]) -> NDArray[np.bool_]:
    """bool [n]: whether a row is close in all layers."""
    layers = [are_close(*both).all((1, 2)) for both in zip(outputs, expected, strict=True)]
    return np.logical_and.reduce(layers)


def check_held(side: Side, position_map: PositionMap) -> None:
    """Every page that a remote writer may hit stays out of use."""
    groups = zip(side.cache._pools.allocators, position_map.runs, side.cache.layout.paging, strict=True)
    for allocator, runs, paging in groups:
        slots = runs.slots()
        assert (allocator._writers[slots[slots != SKIP] // paging.entries] > 0).all()


def check_pages(side: Side) -> None:
    """Every reference is a sequence's or the index's, and every page that has none is free or drains."""
    cache = side.cache
    rows = [cache._table.row(sequence) for sequence in side.known]
    known = cache._pools.prefixes.indexed
    for users, group, indexed in zip(cache._pools.users, cache._table.groups, known, strict=True):
        allocator = users.allocator
        held = [group.held(row) for row in rows]
        counts = np.bincount(np.concatenate([np.empty(0, np.int32), *held]), minlength=allocator.num_pages)
        assert np.array_equal(allocator.references - counts, indexed)
        assert int(indexed.sum()) <= cache.num_cached_pages
        unused = int((allocator.references == 0).sum())
        assert allocator.num_free + allocator.num_draining == unused
        assert users.num_owed == (np.maximum(counts - 1, 0).sum() if users.owes else 0)
    assert min(cache._pools.num_free) >= 0
    if not side.draining:
        assert cache.num_draining_pages == 0
