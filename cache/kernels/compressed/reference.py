"""Compressed KV by token, with torch operations: the reference of this folder's Triton kernels."""

import torch
from torch import Tensor

from tandem.cache.kernels.base import Compression
from tandem.cache.kernels.compressed.tokens import NewTokens, TokenPages
from tandem.cache.kernels.torch.compressed import compress, mask_of, rotate_neighbours
from tandem.cache.kernels.torch.index import choose
from tandem.cache.plan.rope import Rotation


def rotate_and_append(
    pool: Tensor, layer: int, q: Tensor, kv: Tensor, rotation: Rotation | None, slots: Tensor
) -> tuple[Tensor, Tensor]:
    """q [T, heads, D] and kv [T, 1, D], rotated as neighbours; kv is stored where slots, int32 [T], is at least 0.

    pool: [num_pages, layers, 1, 1, page_size, D].
    """
    q, kv = rotate_neighbours(q, rotation), rotate_neighbours(kv, rotation)
    stored = slots >= 0
    pages, places = slots[stored].long() // pool.shape[4], slots[stored].long() % pool.shape[4]
    pool[pages, layer, 0, 0, places] = kv[stored, 0]
    return q, kv


def compress_and_append(
    inputs: Tensor,
    input_layer: int,
    entries: Tensor,
    entry_layer: int,
    x: Compression,
    part: int,
    starts: Rotation | None,
    tokens: NewTokens,
    input_pages: TokenPages,
    entry_pages: TokenPages,
) -> Tensor:
    """Stores the inputs of one part of x, and the entries of that part which the tokens complete. These, as they
    are stored, [T, 1, D]: of tokens that complete none they mean nothing.

    inputs: float32 [num_pages, layers, 2, 1, page_size, W]; entries: [num_pages, layers, 1, 1, page_size, D]. part: 0
    is of entries, 1 of index keys. starts: the rotation of the position where the entry that holds a token begins.
    """
    every, width, size = x.bias.shape[0], x.values.shape[1], entries.shape[5]
    halves = width // sum(norm.shape[0] for norm in x.norms)
    begin = halves * sum(norm.shape[0] for norm in x.norms[:part])
    columns, stored = slice(begin, begin + halves * size), tokens.slots >= 0
    rows, per_page = tokens.slots[stored].long(), inputs.shape[4]
    for plane, values in enumerate((x.values, x.gates)):
        inputs[rows // per_page, input_layer, plane, 0, rows % per_page, columns] = values[stored, columns]
    count = every * halves
    wanted = tokens.positions[:, None] - torch.arange(count - 1, -1, -1, device=tokens.positions.device)
    pages, places = input_pages.places(wanted, inputs.shape[4])
    values, gates = (inputs[pages, input_layer, plane, 0, places][..., columns] for plane in range(2))
    gates = gates + x.bias[:, columns].tile(halves, 1)
    absent = (wanted < 0)[..., None]
    values, gates = values.masked_fill(absent, 0), gates.masked_fill(absent, -torch.inf)
    if halves == 2:  # the entry before offers the first half
        values, gates = (torch.cat((one[:, :every, :size], one[:, every:, size:]), 1) for one in (values, gates))
    made = compress(values, gates, x.norms[part], x.eps).to(entries.dtype).unsqueeze(1)
    made = rotate_neighbours(made, starts)
    ends = stored & ((tokens.positions + 1) % every == 0)
    pages, places = entry_pages.places(tokens.positions[:, None] // every, entries.shape[4])
    entries[pages[ends, 0], entry_layer, 0, 0, places[ends, 0]] = made[ends, 0]
    return made


def attend(
    window: tuple[Tensor, int, TokenPages],
    width: int,
    entries: tuple[Tensor, int, TokenPages] | None,
    visible: Tensor | None,
    chosen: Tensor | None,
    q: Tensor,
    positions: Tensor,
    sinks: Tensor,
    scale: float,
    rotation: Rotation | None,
    longest: int,
) -> Tensor:
    """o [T, heads, D] of rotated q [T, heads, D], rotated back: attention to `width` positions up to a token's own, and
    to entries.

    window, entries: a pool [num_pages, layers, 1, 1, page_size, D], the layer there, and where tokens find it; None:
    there are no entries. visible: int32 [T], the number of first entries that a token sees. chosen: int32 [T, k], the
    visible entries that it attends to, then -1; None: all, and longest is at least the maximum of `visible`. sinks:
    [heads].
    """
    pool, layer, pages = window
    wanted = positions[:, None] - torch.arange(width - 1, -1, -1, device=positions.device)
    keys, seen = _read(pool, layer, pages, wanted), wanted >= 0
    if entries is not None and visible is not None:
        pool, layer, pages = entries
        if chosen is None:
            chosen = torch.arange(longest, dtype=torch.int32, device=q.device).expand(q.shape[0], -1)
        among = (chosen >= 0) & (chosen < visible[:, None])
        keys = torch.cat((keys, _read(pool, layer, pages, chosen.long().masked_fill(~among, 0))), 1)
        seen = torch.cat((seen, among), 1)
    keys = keys.float().masked_fill(~seen[..., None], 0)  # a page that nobody has filled may hold anything
    scores = torch.einsum("thd,tkd->thk", q.float(), keys) * scale + mask_of(seen)[:, None]
    column = sinks.float().view(1, -1, 1).expand(*scores.shape[:2], 1)
    weights = torch.cat((scores, column), 2).softmax(2)[..., :-1]
    output = torch.einsum("thk,tkd->thd", weights, keys).to(q.dtype)
    return rotate_neighbours(output, rotation, back=True)


def choose_entries(
    keys: tuple[Tensor, int, TokenPages], q: Tensor, weights: Tensor, visible: Tensor, top_k: int, longest: int
) -> Tensor:
    """int32 [T, top_k], see attend: the entries of the highest scores by index keys among those that are visible, in
    order; of equal ones the first.

    keys, longest: as entries and longest of attend. q [T, heads, Di], rotated, and weights float32 [T, heads].
    """
    pool, layer, pages = keys
    wanted = torch.arange(longest, device=q.device).expand(q.shape[0], -1)
    seen = wanted < visible[:, None]
    products = torch.einsum("thd,tkd->thk", q.float(), _read(pool, layer, pages, wanted.masked_fill(~seen, 0)).float())
    scores = torch.bmm(weights.unsqueeze(1), products.relu_()).squeeze(1).masked_fill(~seen, -torch.inf)
    return choose(scores, top_k)


def _read(pool: Tensor, layer: int, pages: TokenPages, wanted: Tensor) -> Tensor:
    """Reads entries, int64 [T, n] of each token's sequence, as [T, n, D]."""
    found, places = pages.places(wanted, pool.shape[4])
    return pool[found, layer, 0, 0, places]
