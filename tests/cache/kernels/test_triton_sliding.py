"""The kernel of steps that slide against attention key by key in float64: on a GPU, else in Triton's interpreter."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.cache.kernels.base import DeviceTables
from tandem.cache.kernels.scoring import Scoring
from tandem.cache.kernels.torch.sliding import SlidingRows
from tandem.cache.plan.kv_scales import FP8
from tandem.cache.plan.rope import RopeParameters, RotaryEmbedding
from tests.cache.naive import attend
from tests.support.tolerances import assert_close

pytest.importorskip("triton")

from tandem.cache.kernels.triton.sliding import attend_sliding

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS, LAYER, POSITIONS = 2, 1, 400
# Length, sink, hole, positions dropped, and up to which position K is rotated; a window of 0 in the text is none.
ROWS = [
    (70, 5, 3, 0, 0),
    (9, 0, 2, 40, 30),
    (130, 7, 6, 64, 150),
    (3, 8, 0, 0, 2),
    (90, 4, 7, 8, 1000),
    (1, 0, 0, 0, 0),
]


@dataclass(frozen=True)
class Case:
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    rotary_dim: int | None = 16  # None: no RoPE
    page_size: int = 4
    softcap: float | None = None
    sinks: bool = False
    fp8: bool = False
    dtype: torch.dtype = torch.float32


CASES = {
    "GQA": Case(),
    "MQA with 17 heads": Case(q_heads=17, kv_heads=1),
    "partly rotated": Case(rotary_dim=8),
    "no RoPE": Case(rotary_dim=None),
    "softcap and sinks": Case(softcap=1.5, sinks=True, page_size=8),
    "float16": Case(head_dim=64, rotary_dim=64, dtype=torch.float16),
    "8 bits": Case(head_dim=64, rotary_dim=64, dtype=torch.float16, fp8=True),
}


@pytest.mark.parametrize("name", CASES)
def test_each_key_meets_q_as_it_is_stored(name: str) -> None:
    case, generator = CASES[name], torch.Generator().manual_seed(1)
    size, count = case.page_size, len(ROWS)
    lengths, sinks, holes, dropped, rotated = np.array(ROWS).T
    pages = -(-lengths // size)
    shape = (int(pages.sum()) + 3, LAYERS, 2, case.kv_heads, size, case.head_dim)
    stored = torch.randn(shape, generator=generator).to(FP8 if case.fp8 else case.dtype)
    scales = torch.rand(2, case.kv_heads, generator=generator) + 0.5 if case.fp8 else None
    indices = torch.randperm(shape[0], generator=generator)[: int(pages.sum())].int()
    indptr = torch.from_numpy(np.concatenate(([0], np.cumsum(pages)))).int()
    ways = SlidingRows(
        sinks,
        holes,
        np.minimum(rotated, sinks),
        rotated - dropped,
        lengths - holes - 1,
        np.minimum(lengths + dropped, POSITIONS) - 1,
        POSITIONS,
    )
    last = torch.from_numpy(lengths - (pages - 1) * size).int()
    arrays = (indptr, last, indices, torch.from_numpy(ways.packed(count)))
    tables = DeviceTables(
        torch.zeros(count).int(), *(one.to(DEVICE) for one in arrays[:3]), sliding=arrays[3].to(DEVICE)
    )
    q = torch.randn(count, case.q_heads, case.head_dim, generator=generator).to(case.dtype)
    logits = torch.randn(case.q_heads, generator=generator) if case.sinks else None
    rotary = rotary_of(case, case.dtype, DEVICE)
    output = attend_sliding(
        stored.to(DEVICE),
        LAYER,
        q.to(DEVICE),
        tables,
        None if rotary is None else rotary.of_indices,
        Scoring(case.head_dim**-0.5, softcap=case.softcap),
        None if logits is None else logits.to(DEVICE),
        None if scales is None else scales.to(DEVICE),
    )
    exact = rotary_of(case, torch.float64, "cpu")
    for row, (length, sink, hole, gone, end) in enumerate(ROWS):
        keys, values = [], []
        for key in [*range(min(sink, length)), *range(sink + hole, length)]:
            place = int(indices[int(indptr[row]) + key // size]), LAYER, slice(None), slice(None), key % size
            k, v = (one.double() if scales is None else one.double() * scales.double()[i, :, None]
                    for i, one in enumerate(stored[place].unbind(0)))  # fmt: skip
            position, index = (key, key) if key < sink else (key + gone, key - hole)
            if position >= end:
                k = turn(exact, k, index)
            elif key >= sink:  # as if it had been rotated by its index: only the distance to q counts
                k = turn(exact, k, index - position)
            keys.append(k)
            values.append(v)
        query = turn(exact, q[row].double(), length - hole - 1)[None]
        expected = attend(query, torch.stack(keys), torch.stack(values), softcap=case.softcap, sinks=logits)
        assert_close(output[row].cpu(), expected[0])


def rotary_of(case: Case, dtype: torch.dtype, device: str) -> RotaryEmbedding | None:
    if case.rotary_dim is None:
        return None
    return RotaryEmbedding(RopeParameters("default", case.rotary_dim, theta=100.0), POSITIONS, device, dtype)


def turn(rotary: RotaryEmbedding | None, x: Tensor, positions: int) -> Tensor:
    """x [heads, head_dim] rotated by so many positions, also backwards."""
    if rotary is None:
        return x
    cos, sin = (one.double() for one in rotary.cos_sin(torch.tensor([positions])))
    size = cos.shape[-1]
    head, rest = x[:, :size], x[:, size:]
    first, second = head.chunk(2, -1)
    return torch.cat((head * cos + torch.cat((-second, first), -1) * sin, rest), -1)
