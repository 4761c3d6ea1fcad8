"""The backend for heads that FlashInfer has no kernels for: tiles on a GPU, else all in Triton's interpreter."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.cache.kernels.base import Limits
from tandem.cache.plan.tables import lay_out_tokens
from tests.cache.attention.test_prompt_buffers import prompt_buffers
from tests.cache.attention.test_step_buffers import draw, make_cache, run_forward
from tests.cache.attention.test_step_buffers import run as run_layers
from tests.cache.naive import NaiveCache, cache_of, draw_inputs, layout_of, run, windowed
from tests.cache.naive_trees import NaiveTrees
from tests.support.tolerances import assert_close
from tests.transfer.layouts import two_groups

pytest.importorskip("triton")

from tandem.cache.attention.forward import Batch
from tandem.cache.kernels.paged.kernels import TritonKernels
from tandem.cache.kernels.paged.prompts import TOKENS, attend_tiles, lay_out_tiles
from tandem.cache.kernels.scoring import Scoring
from tandem.cache.kernels.torch.kernels import TorchKernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
interpreted = pytest.mark.skipif(DEVICE == "cuda", reason="these caches are on a CPU")
LAYERS, LAYER, PAGE = 2, 1, 8


@dataclass(frozen=True)
class Case:
    """sequences: positions before, and new tokens."""

    head_dim: int = 16
    q_heads: int = 4
    kv_heads: int = 2
    dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    fp8: bool = False
    causal: bool = True
    sequences: Sequence[tuple[int, int]] = ((0, 1), (30, 1), (0, 2 * TOKENS + 3), (41, TOKENS + 1))


CASES = {
    "grouped heads": Case(),
    "more heads than a program has": Case(q_heads=7, kv_heads=1),
    "sinks and softcap": Case(sinks=True, softcap=1.5),
    "window": Case(window=9),
    "all that is stored": Case(causal=False, window=9),
    "heads of 512": Case(head_dim=512, dtype=torch.float16, sequences=((37, 3), (0, 19))),
    "8 bits": Case(head_dim=64, dtype=torch.float16, fp8=True, sequences=((37, 3), (0, 19))),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_tiles(case: Case) -> None:
    generator = torch.Generator().manual_seed(0)
    before, new = np.array(case.sequences).T
    tokens, ends = lay_out_tokens(before, new), before + new
    counts = -(-ends // PAGE)
    pages = torch.randperm(int(counts.sum()) + 2, generator=generator)[:-2].int()
    shape = (pages.shape[0] + 2, LAYERS, 2, case.kv_heads, PAGE, case.head_dim)
    stored = torch.randn(shape, generator=generator)
    pool = stored.to(torch.float8_e4m3fn if case.fp8 else case.dtype)
    scales = torch.rand(2, case.kv_heads, generator=generator) + 0.5 if case.fp8 else None
    q = torch.randn(int(new.sum()) + 3, case.q_heads, case.head_dim, generator=generator).to(case.dtype)
    sinks = torch.randn(case.q_heads, generator=generator) if case.sinks else None
    scoring = Scoring(case.head_dim**-0.5, case.window if case.causal else None, case.softcap)
    begins = np.concatenate(([0], np.cumsum(counts)))
    laid = lay_out_tiles(tokens.qo_indptr[:-1], new, begins[:-1], ends, causal=case.causal, window=scoring.window)
    tiles = np.concatenate((laid, np.zeros((2, laid.shape[1]), np.int32)))  # the last compute nothing
    on_device = [one.to(DEVICE) for one in (q, torch.from_numpy(tiles), pages)]
    of_heads = [None if one is None else one.to(DEVICE) for one in (sinks, scales)]
    arguments: list[Any] = [*on_device, scoring, *of_heads]
    output, lse = attend_tiles(pool.to(DEVICE), LAYER, *arguments, with_lse=not case.sinks, padded=True)
    assert not output[int(new.sum()) :].any()
    entries = pool.double() if scales is None else pool.double() * scales.double()[:, :, None, None]
    for sequence, (first, last) in enumerate(zip(tokens.qo_indptr, tokens.qo_indptr[1:], strict=False)):
        own = entries[pages[begins[sequence] : begins[sequence + 1]].long(), LAYER]
        k, v = own.transpose(0, 1).transpose(1, 2).flatten(2, 3)[:, :, : ends[sequence]]  # [2, heads, positions, D]
        for token in range(first, last):
            position = int(before[sequence]) + token - first
            end = position + 1 if case.causal else int(ends[sequence])
            start = 0 if scoring.window is None else max(0, end - scoring.window)
            group = case.q_heads // case.kv_heads
            keys, values = (one[:, start:end].repeat_interleave(group, 0) for one in (k, v))
            scores = torch.einsum("hd,hnd->hn", q[token].double(), keys) * scoring.scale
            if case.softcap is not None:
                scores = case.softcap * torch.tanh(scores / case.softcap)
            if sinks is None:
                assert lse is not None
                found = lse[token].cpu() * math.log(2)
                torch.testing.assert_close(found, scores.logsumexp(1).float(), rtol=1e-3, atol=2e-3)
            else:
                scores = torch.cat((scores, sinks.double()[:, None]), 1)
            weights = scores.softmax(1)[:, : values.shape[1]]
            assert_close(output[token].cpu(), torch.einsum("hn,hnd->hd", weights, values))


PROGRAM = [{0: 5, 1: 9}, {2: 6, 0: 1, 3: 19, 1: 4}, {1: 1, 0: 1}]
BOTH = windowed(layout_of(2, 1), None, 6)


@interpreted
def test_forwards_of_prompts_chunks_and_decodes() -> None:
    cache = cache_of(BOTH, num_pages=64, kernels=TritonKernels, softcap=3.0)
    naive = NaiveCache(BOTH, softcap=3.0)
    for step, appends in enumerate(PROGRAM):
        for sequence in appends.keys() - naive.sequences.keys():
            cache.add_sequence(sequence)
            naive.add(sequence)
        batch = (list(appends), list(appends.values()), draw_inputs(BOTH, sum(appends.values()), seed=step))
        for actual, expected in zip(run(cache, *batch), naive.run(*batch), strict=True):
            assert_close(actual, expected)


@interpreted
def test_nodes_of_trees_beside_plain_sequences() -> None:
    cache, naive = cache_of(BOTH, num_pages=64, kernels=TritonKernels), NaiveCache(BOTH)
    trees = NaiveTrees(naive)
    for sequence in range(3):
        cache.add_sequence(sequence)
        naive.add(sequence)
    for step, (lengths, parents) in enumerate((([7, 3], None), ([4, 2, 1], [[-1, 0, 0, 1], None, [-1]]))):
        sequences, inputs = list(range(len(lengths))), draw_inputs(BOTH, sum(lengths), seed=step)
        actual = run(cache, sequences, lengths, inputs, parents=parents)
        expected = trees.run(sequences, parents or [None] * len(lengths), lengths, inputs)
        for own, theirs in zip(actual, expected, strict=True):
            assert_close(own, theirs)


@pytest.mark.gate("verify steps")
@interpreted
@pytest.mark.parametrize("kind", ["steps", "verify steps", "prompts"])
def test_graph_buffers(kind: str) -> None:
    """Outputs equal other kernels', also after such a forward. Padding stores nothing."""
    layout = windowed(two_groups(), None, 6)
    fixed, plain = make_cache(TritonKernels, layout=layout), make_cache(TorchKernels, layout=layout)
    if kind == "prompts":
        (buffers,) = prompt_buffers(fixed, [24], 3)
    elif kind == "steps":
        (buffers,) = fixed.graph_buffers([Limits.of_step(4, 4, 0)])
    else:
        (buffers,) = fixed.graph_buffers([Limits.of_verification(9, 4, 0)])
    programs: dict[str, list[dict[int, int]]] = {
        "steps": [{0: 1, 3: 1}, {0: 1, 1: 1, 2: 1, 3: 1}],
        "verify steps": [{2: 4, 0: 1}, {0: 2, 3: 5}],
        "prompts": [{1: 19, 0: 1}, {3: 2, 1: 3, 2: 9}],
    }
    for step, counts in enumerate(programs[kind]):
        total, batch = sum(counts.values()), (list(counts), list(counts.values()))
        inputs = draw(total, seed=step)
        if kind == "prompts":
            ids = np.arange(total)
            fixed.commit(fixed.begin(Batch(*batch, push=False), buffers, [ids, np.zeros(0, np.int64)]))
        else:
            fixed.begin(Batch(*batch), buffers, [])
        plan = buffers.attention()
        rows = {layer: [_padded(one, buffers.size) for one in tensors] for layer, tensors in inputs.items()}
        actual = run_layers(plan.attend, rows)
        for ours, theirs in zip(actual, run_forward(plain, *batch, inputs), strict=True):
            torch.testing.assert_close(ours[:total], theirs)


def _padded(rows: Tensor, size: int) -> Tensor:
    """Rows of large numbers that must not get anywhere."""
    return torch.cat((rows, torch.full((size - rows.shape[0], *rows.shape[1:]), 1e3)))
