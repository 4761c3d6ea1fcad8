"""Kernels of compressed KV against torch's, which are their reference: on a GPU, else in Triton's interpreter."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tandem.cache.kernels.base import Compression
from tandem.cache.kernels.compressed import attend as triton_attend
from tandem.cache.kernels.compressed import compress as triton_compress
from tandem.cache.kernels.compressed import reference
from tandem.cache.kernels.compressed import rotate as triton_rotate
from tandem.cache.kernels.compressed.choose import choose_entries
from tandem.cache.kernels.compressed.tokens import NewTokens, TokenPages
from tandem.cache.kernels.entry_tiling import FEW
from tandem.cache.kinds.compressed import Beside
from tandem.cache.kinds.kind import check_gpu
from tandem.cache.kinds.shared import Shared
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.rope import Rotation
from tandem.cache.plan.spans import Every, Window
from tests.support.kinds import changed
from tests.support.tolerances import assert_close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS, LAYER, PAGES = 2, 1, 64


@dataclass(frozen=True)
class Case:
    """lengths: of the sequences with their new tokens. The last has `new`, each other one."""

    lengths: tuple[int, ...] = (70, 1, 32, 64, 41)
    new: int = 11
    every: int = 4
    size: int = 32
    key_size: int | None = 16  # None: tokens choose none, and entries do not overlap
    heads: int = 5
    window: int = 24
    page_size: int = 8
    entries_per_page: int = 4
    dtype: torch.dtype = torch.float32

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.size,) if self.key_size is None else (self.size, self.key_size)

    @property
    def halves(self) -> int:
        return 1 if self.key_size is None else 2


CASES = {
    "overlapping": Case(),
    "apart": Case(every=32, key_size=None, lengths=(96, 1, 32, 33, 140), new=70, entries_per_page=1, heads=17),
    "half": Case(dtype=torch.float16, size=64, key_size=32, heads=16, page_size=4),
}
WIDE = Case(lengths=(70, 1, 32, 1, 1, 41), dtype=torch.float16, size=64, heads=64)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def rotation_of(case: Case, count: int, seed: int, rotated: int = 8) -> Rotation:
    angles = draw(count, rotated // 2, seed=seed)
    cos, sin = torch.cat((angles, angles), 1).cos(), torch.cat((-angles, angles), 1).sin()
    return Rotation(torch.stack((cos, sin), 1).to(case.dtype))


def lay_out(case: Case, per_page: int, every: int, keeps: int | None, seed: int) -> tuple[TokenPages, Tensor]:
    """Pages of a group for every token, and the tokens' slots, int32: after each sequence's last `keeps` entries and
    its new ones no page stands. Of entries of several positions, slots mean nothing."""
    random = np.random.default_rng(seed)
    free = random.permutation(PAGES)[::-1].tolist()
    firsts, begins, indices, slots = [], [], [], []
    for number, length in enumerate(case.lengths):
        new = case.new if number == len(case.lengths) - 1 else 1
        count = length // every
        begin = 0 if keeps is None else max(0, length - new + 1 - keeps) // per_page * per_page
        pages = [free.pop() for _ in range(begin // per_page, -(-count // per_page))]
        firsts += [len(indices)] * new
        begins += [begin] * new
        indices += pages
        relative = [position - begin for position in range(length - new, length)]
        if every == 1:
            slots += [pages[one // per_page] * per_page + one % per_page for one in relative]
    arrays = (torch.tensor(one, dtype=torch.int32, device=DEVICE) for one in (firsts, begins, [*indices, 0]))
    return TokenPages(*arrays), torch.tensor(slots, dtype=torch.int32, device=DEVICE)


def positions_of(case: Case) -> tuple[Tensor, Tensor]:
    """Returns the positions of the new tokens, and how many new ones of the same sequence come before each."""
    ones = [length - 1 for length in case.lengths[:-1]]
    last = list(range(case.lengths[-1] - case.new, case.lengths[-1]))
    preceding = [0] * len(ones) + list(range(case.new))
    return (
        torch.tensor(ones + last, device=DEVICE),
        torch.tensor(preceding, dtype=torch.int32, device=DEVICE),
    )


def compression(case: Case, count: int) -> Compression:
    width = case.halves * sum(case.sizes)
    norms = tuple(1 + 0.2 * draw(size, seed=3) for size in case.sizes)
    values, gates = draw(count, width, seed=4), 2 * draw(count, width, seed=5)
    return Compression(values, gates, draw(case.every, width, seed=6), norms, 1e-6)


@pytest.mark.parametrize("padding", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_what_tokens_complete(case: Case, padding: bool) -> None:
    """Entries are made of stored inputs, of the forward's own and of both. The first of a text has no inputs before
    it. Nothing is stored for tokens of padding."""
    positions, preceding = positions_of(case)
    count = positions.shape[0]
    input_pages, slots = lay_out(case, case.page_size, 1, case.every * case.halves, seed=1)
    entry_pages, _ = lay_out(case, case.entries_per_page, case.every, None, seed=2)
    if padding:
        slots[:3] = -1
    tokens, x = NewTokens(positions, preceding, slots), compression(case, count)
    inputs = draw(PAGES, LAYERS, 2, 1, case.page_size, x.values.shape[1], seed=7)
    starts = rotation_of(case, count, seed=8)
    for part, size in enumerate(case.sizes):
        entries = draw(PAGES, LAYERS, 1, 1, case.entries_per_page, size, seed=9, dtype=case.dtype)
        pools = [(inputs.clone(), entries.clone()) for _ in range(2)]
        made = [
            compress(mine, LAYER, its, LAYER, x, part, starts, tokens, input_pages, entry_pages)
            for compress, (mine, its) in zip(
                (reference.compress_and_append, triton_compress.compress_and_append), pools, strict=True
            )
        ]
        assert torch.equal(pools[0][0], pools[1][0])
        assert not torch.equal(pools[0][0], inputs)
        assert_close(pools[1][1], pools[0][1])
        ends = ((positions + 1) % case.every == 0) & (slots >= 0)
        assert ends.any()
        assert_close(made[1][ends], made[0][ends])
        changed = (pools[1][1] != entries).flatten(1).any(1).sum()
        assert 0 < changed <= ends.sum()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_rotation_and_append(case: Case) -> None:
    case = replace(case, new=3)
    positions, _ = positions_of(case)
    count = positions.shape[0]
    _, slots = lay_out(case, case.page_size, 1, case.window, seed=1)
    slots[1] = -1
    q, kv = (
        draw(count, case.heads, case.size + 3, dtype=case.dtype)[..., 3:],
        draw(count, 1, case.size, dtype=case.dtype),
    )
    pool, rotation = draw(PAGES, LAYERS, 1, 1, case.page_size, case.size, dtype=case.dtype), rotation_of(case, count, 2)
    pools = pool.clone(), pool.clone()
    expected = reference.rotate_and_append(pools[0], LAYER, q, kv, rotation, slots)
    found = triton_rotate.rotate_and_append(pools[1], LAYER, q, kv, rotation, slots)
    for one, other in zip((*found, pools[1]), (*expected, pools[0]), strict=True):
        assert_close(one, other)
    assert_close(triton_rotate.rotate_queries(q, rotation), expected[0])
    assert torch.equal(triton_rotate.rotate_queries(q, None), q)
    assert not torch.equal(pools[1], pool)


@pytest.mark.gate("*-one share", "overlapping-many shares")
@pytest.mark.parametrize(
    ("case", "programs"),
    [*((case, programs) for case in CASES.values() for programs in (1, 1000)), (WIDE, None)],
    ids=[*(f"{name}-{shares}" for name in CASES for shares in ("one share", "many shares")), "many heads"],
)
def test_attention(case: Case, programs: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens attend to a window alone, to all entries, and to chosen entries, fewer than there is room for. Pages that
    nobody has filled hold no numbers, nor do the shares of a short sequence that have nothing to attend to."""
    monkeypatch.setattr(torch, "empty", lambda *x, **options: torch.full(*x, fill_value=torch.nan, **options))
    monkeypatch.setattr(triton_attend, "SHARES_PER_TILE", 4)
    one_share = triton_attend.MANY._replace(programs=1)  # an interpreter takes long to merge shares of many heads
    monkeypatch.setattr(triton_attend, "MANY", one_share)
    if programs is not None:
        small = FEW._replace(entries=16, programs=programs)
        monkeypatch.setattr(triton_attend, "choose_tiling", lambda q, many: small)
    wide, case = case is WIDE, replace(case, new=3)
    positions, _ = positions_of(case)
    count = positions.shape[0]
    window_pages, _ = lay_out(case, case.page_size, 1, case.window, seed=1)
    entry_pages, _ = lay_out(case, case.entries_per_page, case.every, None, seed=2)
    window = draw(PAGES, LAYERS, 1, 1, case.page_size, case.size, seed=1, dtype=case.dtype)
    entries = draw(PAGES, LAYERS, 1, 1, case.entries_per_page, case.size, seed=2, dtype=case.dtype)
    unused = [sorted(set(range(PAGES)) - set(one.kv_indices[:-1].tolist())) for one in (window_pages, entry_pages)]
    window[unused[0]], entries[unused[1]] = torch.nan, torch.nan
    q, sinks = draw(count, case.heads, case.size, seed=3, dtype=case.dtype), draw(case.heads, seed=4)
    assert (triton_attend.choose_tiling(q, triton_attend.MANY) == triton_attend.MANY) == wide
    visible = ((positions + 1) // case.every).int()
    longest, rotation = int(visible.max()), rotation_of(case, count, 5)
    chosen = torch.full((count, 13), -1, dtype=torch.int32, device=DEVICE)
    for row, most in zip(chosen, visible.tolist(), strict=True):
        some = torch.randperm(most, generator=torch.Generator().manual_seed(most))[:13].sort().values
        row[: some.shape[0]] = some
    of_window, of_entries = (window, LAYER, window_pages), (entries, LAYER, entry_pages)
    for beside, sees, picked in ((None, None, None), (of_entries, visible, None), (of_entries, visible, chosen)):
        arguments: Any = (of_window, case.window, beside, sees, picked, q, positions, sinks, 0.3, rotation, longest)
        assert_close(triton_attend.attend(*arguments), reference.attend(*arguments))


@pytest.mark.parametrize("case", [CASES["overlapping"], CASES["half"]], ids=["float32", "half"])
def test_what_is_chosen(case: Case) -> None:
    """The kernels of index keys for each position choose over entries."""
    case = replace(case, entries_per_page=4)
    positions, _ = positions_of(case)
    assert case.key_size is not None
    pages, _ = lay_out(case, case.entries_per_page, case.every, None, seed=2)
    pool = draw(PAGES, LAYERS, 1, 1, case.entries_per_page, case.key_size, seed=2, dtype=case.dtype)
    q = draw(positions.shape[0], 16, case.key_size, seed=3, dtype=case.dtype)
    weights, visible = draw(positions.shape[0], 16, seed=4), ((positions + 1) // case.every).int()
    arguments = (pool, LAYER, pages), q, weights, visible, 6, int(visible.max())
    assert torch.equal(choose_entries(*arguments), reference.choose_entries(*arguments))


def test_what_kernels_on_a_gpu_take() -> None:
    shared = LayerGroup((0,), Shared(512, Window(128)))
    inputs = LayerGroup((0,), Beside(1, 1280, Window(8), dtype=torch.float32))
    entries = LayerGroup((0,), Beside(1, 512, Every(4), planes=1))
    keys = LayerGroup((0,), Beside(1, 128, Every(4), planes=1, top_k=512))
    check_gpu(KVLayout((shared, inputs, entries, keys), 64, torch.bfloat16), None)
    for name, groups in (
        (
            "head_dim is 48",
            (changed(shared, head_dim=48), changed(inputs, head_dim=352), changed(entries, head_dim=48)),
        ),
        ("index_head_dim is 96", (shared, changed(inputs, head_dim=1216), entries, changed(keys, head_dim=96))),
    ):
        every = groups if len(groups) == 4 else (*groups, keys)
        for dtype in (torch.bfloat16, torch.float32):
            with pytest.raises(InvalidArgument, match=f"{name}; on a GPU it must be one of 16, 32, 64, 128, 256, 512"):
                check_gpu(KVLayout(every, 64, dtype), None)
