"""Single queries over 8-bit entries against softmax over gathered positions: on a GPU, else in Triton's interpreter."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.cache.kv_scales import FP8
from tests.cache.naive import attend
from tests.tolerances import assert_close

pytest.importorskip("triton")

from tandem.cache.kernels import triton_fp8_decode
from tandem.cache.kernels.triton_fp8_decode import attend_fp8

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS, LAYER = 2, 1


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    page_size: int = 8
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


CASES = {
    "GQA": Case((1, 37, 130, 64)),
    "MQA of 7": Case((5, 70), kv_heads=1, group=7),
    "MHA, pages of 16": Case((16, 33), group=1, page_size=16, head_dim=32),
    "window": Case((90, 5), window=20),
    "softcap": Case((70,), softcap=2.0),
    "sinks": Case((70, 1), sinks=True),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_against_softmax(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few splits, for the interpreter's sake: some of them empty, some with more than one block."""
    monkeypatch.setattr(triton_fp8_decode, "MOST_SPLITS", 2)
    generator = torch.Generator().manual_seed(0)
    counts = np.array([-(-length // case.page_size) for length in case.lengths])
    shape = (int(counts.sum()) + 2, LAYERS, 2, case.kv_heads, case.page_size, case.head_dim)
    pool = torch.randn(shape, generator=generator).to(FP8)
    pages = torch.randperm(shape[0], generator=generator)[: counts.sum()].to(torch.int32)
    indptr = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    last = np.array(case.lengths, np.int32) - (counts.astype(np.int32) - 1) * case.page_size
    q = torch.randn(len(case.lengths), case.kv_heads * case.group, case.head_dim, generator=generator).to(dtype) * 3
    scales = torch.rand(2, case.kv_heads, generator=generator) + 0.2
    sinks = torch.randn(q.shape[1], generator=generator) if case.sinks else None
    tables = [torch.from_numpy(array).to(DEVICE) for array in (indptr, last)]
    actual = attend_fp8(
        pool.to(DEVICE), LAYER, q.to(DEVICE), tables[0], pages.to(DEVICE), tables[1], scales.to(DEVICE), scale=0.3,
        window=case.window, softcap=case.softcap, sinks=None if sinks is None else sinks.to(DEVICE),
    )  # fmt: skip
    expected = []
    for index, length in enumerate(case.lengths):
        own = pages[indptr[index] : indptr[index + 1]].long()
        k, v = gathered(pool[own, LAYER].float() * scales[..., None, None], length)
        options: dict[str, Any] = {"window": case.window, "softcap": case.softcap, "sinks": sinks}
        expected.append(attend(q[index : index + 1].double(), k, v, scale=0.3, **options))
    assert_close(actual.cpu().half(), torch.cat(expected))


def gathered(pages: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """k and v [length, heads, dim] of pages [n, 2, heads, page_size, dim]."""
    k, v = pages.double().permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :length]
    return k, v
