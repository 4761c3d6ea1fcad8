"""Attention of token trees on a GPU: nodes attend to their trees, and the result is merged with attention to their
contexts.

The positions before a tree that all its nodes see are for any attention kernel that gives its log-sum-exp. Here a few
nodes, with all heads of a KV head, go through K and V tile by tile: of the tree, and of earlier positions that a window
shows to some nodes only. The softmax goes on from the context's (Milakov and Gimelshein, 2018), whose output counts as
an earlier tile.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.cache.kernels.scoring import Scoring
from tandem.cache.kernels.sizes import cdiv, next_power_of_2
from tandem.cache.kernels.tree_contexts import TreeContexts, split_contexts
from tandem.cache.kernels.triton.dependent_launch import launch_options
from tandem.cache.plan.arrays import ragged_range
from tandem.cache.plan.tables import PageTables, TokenLayout
from tandem.cache.plan.token_tree import MASK_WORDS

NODES_PER_TILE = 16
HEADS_PER_TILE = 8  # of those that share a KV head
KEYS_PER_TILE = 64
WARPS = 4
WIDE, WIDE_HEADS, WIDE_KEYS, WIDE_WARPS = 512, 2, 16, 8  # a head_dim, and what fits on a multiprocessor with it
TILE_FIELDS = 6


@dataclass(frozen=True, eq=False)
class TreeTiles:
    """The new nodes of all trees, packed, in tiles of up to NODES_PER_TILE nodes of one tree. On the device, flat.

    slots: int32, for each tree the slots of earlier positions that only some new nodes see, then of all its nodes.
    tiles: int32 [tiles, TILE_FIELDS]: the first node among the packed ones, the number of nodes, the tree's first slot,
    the number of its slots that the tile may see, how many slots come before the tree, and whether a context exists
    that all see. masks: int32 [nodes, MASK_WORDS], see TokenTrees. edges: int32 [nodes], see TreeContexts.
    """

    tiles: Tensor
    slots: Tensor
    masks: Tensor
    edges: Tensor


def lay_out_tiles(
    tokens: TokenLayout, tables: PageTables, page_size: int, window: int | None
) -> tuple[TreeContexts | None, list[NDArray[np.int32]]]:
    """Returns the contexts of the forward's trees, in these tables and with this window, and the values of TreeTiles'
    tensors. None and an empty list without trees."""
    trees = tokens.trees
    if trees is None:
        return None, []
    contexts = split_contexts(trees, tables, page_size, window)
    appends, before = trees.counts, contexts.commons - contexts.firsts
    pieces = np.stack((before, trees.sizes), 1)
    positions = ragged_range(np.stack((contexts.firsts, contexts.bases), 1).reshape(-1), pieces.reshape(-1))
    lengths = pieces.sum(1)
    first_page_indexes = np.repeat(tables.kv_indptr[trees.sequences], lengths)
    slots = tables.kv_indices[first_page_indexes + positions // page_size] * page_size + positions % page_size
    counts = -(-appends // NODES_PER_TILE)
    owners = np.repeat(np.arange(counts.size), counts)
    steps = ragged_range(np.zeros_like(counts), counts) * NODES_PER_TILE
    sizes = np.minimum(appends[owners] - steps, NODES_PER_TILE)
    tiles = np.stack(
        (
            (np.cumsum(appends) - appends)[owners] + steps,
            sizes,
            (np.cumsum(lengths) - lengths)[owners],
            (lengths - appends)[owners] + steps + sizes,  # parents come first, so no node sees what comes later
            before[owners],
            (contexts.bases > contexts.commons)[owners],
        ),
        1,
    )
    masks = trees.masks_in(window).view(np.int32)
    return contexts, [tiles.astype(np.int32).reshape(-1), slots.astype(np.int32), masks.reshape(-1), contexts.edges]


def attend_trees(
    pool: Tensor,
    layer: int,
    q: Tensor,
    context: Tensor,
    lse: Tensor,
    tiles: TreeTiles,
    scoring: Scoring,
    sinks: Tensor | None,
    fp8_scales: Tensor | None = None,
) -> Tensor:
    """o of n packed nodes. It is written over `context`: their output over the positions that all nodes of their trees
    see.

    pool: [num_pages, layers, 2, num_kv_heads, page_size, head_dim], contiguous. q, context: [n, num_q_heads, head_dim],
    contiguous; head_dim is a power of two of at least 16. lse: float32 [n, num_q_heads], of base 2, of context; both
    are ignored for trees without one. sinks: [num_q_heads]. A context must not have counted those. fp8_scales: of a
    float8_e4m3fn pool, float32 [2, num_kv_heads], by which its entries are multiplied.
    """
    _, _, _, num_kv_heads, page_size, head_dim = pool.shape
    group = q.shape[1] // num_kv_heads
    wide = head_dim >= WIDE
    most, keys = (WIDE_HEADS, WIDE_KEYS) if wide else (HEADS_PER_TILE, KEYS_PER_TILE)
    heads = min(next_power_of_2(group), most)
    kernel: Any = _attend_trees[(tiles.tiles.shape[0] // TILE_FIELDS, num_kv_heads * cdiv(group, heads))]
    kernel(
        *(pool, q, context, lse, sinks, fp8_scales, tiles.tiles, tiles.slots, tiles.masks, tiles.edges),
        *(pool.stride(0), layer * pool.stride(1), scoring.scale, scoring.softcap or 0.0),
        *(num_kv_heads, group, heads, page_size, head_dim, NODES_PER_TILE, keys, TILE_FIELDS, MASK_WORDS),
        *(scoring.softcap is not None, sinks is not None, fp8_scales is not None),
        num_warps=WIDE_WARPS if wide else WARPS,
        **launch_options(pool.device),
    )
    return context


@triton.jit
def read_tile(tiles, FIELDS: tl.constexpr):
    """The fields of this program's tile, in their order in TreeTiles."""
    tile = tiles + tl.program_id(0) * FIELDS
    first, count, first_slot = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    num_keys, num_before, has_context = tl.load(tile + 3), tl.load(tile + 4), tl.load(tile + 5)
    return first, count, first_slot, num_keys, num_before, has_context


@triton.jit
def what_is_seen(masks, edges, node, there, key, inside, num_before, WORDS: tl.constexpr):
    """bool [rows, keys]: which slots `key` of a tree, those that are `inside`, the nodes `node` of the rows that are
    `there` see; the rest as in TreeTiles."""
    in_tree = tl.maximum(key - num_before, 0)
    words = tl.load(
        masks + node[:, None] * WORDS + in_tree[None, :] // 32,
        mask=there[:, None] & (inside & (key >= num_before))[None, :],
        other=0,
    )
    edge = tl.load(edges + node, mask=there, other=0)
    before = (key < num_before)[None, :] & (key[None, :] >= edge[:, None])
    return before | (((words >> (in_tree % 32)[None, :]) & 1) != 0)


@triton.jit
def begin_softmax(lse, output, seen):
    """Begins the softmax of rows that have `seen` a context. Returns the largest score, of base 2, and the sums of
    weights and of weighted values. lse: pointers [rows]; output: pointers [rows, columns]."""
    top = tl.load(lse, mask=seen, other=float("-inf"))
    weighted = tl.load(output, mask=seen[:, None], other=0.0).to(tl.float32)
    return top, tl.where(seen, 1.0, 0.0), weighted


@triton.jit
def add_sink(top, total, weighted, sink):
    """Adds a score, natural, that has no value to a softmax so far."""
    sink = sink.to(tl.float32) * 1.4426950408889634
    highest = tl.maximum(top, sink)
    shrunk = tl.exp2(top - highest)
    return highest, total * shrunk + tl.exp2(sink - highest), weighted * shrunk[:, None]


@triton.jit
def add_keys(top, total, weighted, scores, values):
    """Adds more keys, with scores of base 2, to a softmax so far."""
    highest = tl.maximum(top, tl.max(scores, 1))
    finite = tl.where(highest == float("-inf"), 0.0, highest)  # nothing seen so far
    weights = tl.exp2(scores - finite[:, None])
    shrunk = tl.exp2(top - finite)
    weighted = weighted * shrunk[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return highest, total * shrunk + tl.sum(weights, 1), weighted


@triton.jit
def end_softmax(output, total, weighted, there):
    """Stores the rows that are `there`. output: pointers [rows, columns]."""
    total = tl.where(there, total, 1.0)  # no 0 / 0 in unused rows
    tl.store(output, (weighted / total[:, None]).to(output.dtype.element_ty), mask=there[:, None])


@triton.jit
def load_entries(pointers, inside, scale, dtype: tl.constexpr, FP8: tl.constexpr):
    """K or V at `pointers`, those that are `inside`, multiplied by what is at `scale` where they have 8 bits."""
    entries = tl.load(pointers, mask=inside, other=0.0)
    if FP8:
        entries = (entries.to(tl.float32) * tl.load(scale)).to(dtype)
    return entries


@triton.jit
def _attend_trees(
    pool, q, output, lse, sinks, fp8_scales, tiles, slots, masks, edges,
    page_elements, layer_elements, scale, softcap,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    NODES: tl.constexpr, KEYS: tl.constexpr, FIELDS: tl.constexpr, WORDS: tl.constexpr,
    SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, FP8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program has one tile of nodes and up to HEADS q heads of one KV head; scores and log-sum-exp are of base 2."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    first, count, first_slot, num_keys, num_before, has_context = read_tile(tiles, FIELDS)  # pyright: ignore[reportGeneralTypeIssues]
    kv_head, part = tl.program_id(1) % KV_HEADS, tl.program_id(1) // KV_HEADS
    row, column = tl.arange(0, NODES * HEADS), tl.arange(0, HEAD_DIM)
    node, in_group = row // HEADS, part * HEADS + row % HEADS
    there = (node < count) & (in_group < GROUP)
    head = kv_head * GROUP + in_group
    q_row = (first + node) * (KV_HEADS * GROUP) + head
    elements = q_row[:, None] * HEAD_DIM + column[None, :]
    queries = tl.load(q + elements, mask=there[:, None], other=0.0)
    top, total, weighted = begin_softmax(lse + q_row, output + elements, there & (node < count * has_context))
    if HAS_SINKS:
        top, total, weighted = add_sink(top, total, weighted, tl.load(sinks + head, mask=there, other=0.0))
    k_scale = fp8_scales + kv_head if FP8 else None
    v_scale = fp8_scales + KV_HEADS + kv_head if FP8 else None
    for begin in range(0, num_keys, KEYS):
        key = begin + tl.arange(0, KEYS)
        inside = key < num_keys
        slot = tl.load(slots + first_slot + key, mask=inside, other=0)
        rows = (
            pool + (slot // PAGE_SIZE).to(tl.int64) * page_elements
            + layer_elements + kv_head * (PAGE_SIZE * HEAD_DIM) + (slot % PAGE_SIZE) * HEAD_DIM
        )  # fmt: skip
        keys = load_entries(rows[None, :] + column[:, None], inside[None, :], k_scale, queries.dtype, FP8)
        scores = tl.dot(queries, keys, input_precision="ieee") * scale
        if SOFTCAP:
            scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
        seen = what_is_seen(masks, edges, first + node, there, key, inside, num_before, WORDS)
        scores = tl.where(seen, scores * 1.4426950408889634, float("-inf"))
        rows += KV_HEADS * PAGE_SIZE * HEAD_DIM
        values = load_entries(rows[:, None] + column[None, :], inside[:, None], v_scale, queries.dtype, FP8)
        top, total, weighted = add_keys(top, total, weighted, scores, values)
    end_softmax(output + elements, total, weighted, there)
