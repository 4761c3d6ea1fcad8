"""Checks which tiling multiplies which weight. The kernels themselves need a GPU: tests/gpu/test_streamed_gemms.py."""

from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.workers.kernels.skinny_gemm.streamed import (
    TILINGS,
    TOKENS,
    StreamedGemm,
    StreamedGemms,
    choose_tiling,
    load_streamed_gemms,
)

H200 = 132  # multiprocessors


@pytest.mark.parametrize(
    ("rows", "columns", "gated"),
    [(6144, 4096, False), (4096, 4096, False), (4096, 12288, False), (24576, 4096, True)],
)
@pytest.mark.parametrize("tokens", [16, 32, 64])
def test_weights_of_an_8b_model_are_shared_out_evenly(rows: int, columns: int, gated: bool, tokens: int) -> None:
    tiling = choose_tiling(rows, columns, H200, tokens=tokens, gated=gated)
    assert tiling is not None
    assert rows // tiling.height * tiling.splits == 128
    assert tiling.height >= 64


@pytest.mark.parametrize(
    ("rows", "columns", "gated"),
    [
        (4096, 4100, False),  # columns that are not whole slabs
        (4098, 4096, False),
        (28672, 4096, True),  # a second block for some multiprocessors
        (1024, 2048, False),  # too few for every multiprocessor
        (151936, 4096, False),
        (24576, 4128, True),
    ],
)
def test_other_weights_are_left_to_torch(rows: int, columns: int, gated: bool) -> None:
    assert choose_tiling(rows, columns, H200, tokens=64, gated=gated) is None


@given(st.integers(1, 3000), st.integers(1, 300), st.booleans(), st.sampled_from([80, H200]), st.sampled_from(TOKENS))
def test_no_multiprocessor_has_much_more_than_its_share(
    blocks_of_rows: int, slabs: int, gated: bool, multiprocessors: int, tokens: int
) -> None:
    rows, columns = 16 * blocks_of_rows, 64 * slabs
    tiling = choose_tiling(rows, columns, multiprocessors, tokens=tokens, gated=gated)
    if tiling is None:
        return
    assert tiling.gated == gated
    assert slabs % tiling.splits == 0
    busiest = [0.0] * multiprocessors
    for block in range(-(-rows // tiling.height) * tiling.splits):
        busiest[block % multiprocessors] += tiling.height * columns / tiling.splits
    assert max(busiest) <= 1.31 * rows * columns / multiprocessors


def test_few_rows_are_taken_where_a_layer_has_no_other_products() -> None:
    def prepared() -> StreamedGemm:
        gemms = StreamedGemms.__new__(StreamedGemms)
        gemms.module = Mock()
        return StreamedGemm(gemms, torch.empty(4096, 4096), [one for one in TILINGS if one.height == 64])

    alone, chained = prepared(), [prepared(), prepared()]
    StreamedGemm.chain([alone, None])
    StreamedGemm.chain(chained)
    taken = [rows for rows in range(1, 200) if alone.takes(torch.empty(rows, 4096))]
    assert taken == [*range(33, 65), *range(97, 129)]
    for one in chained:
        few = [rows for rows in range(1, 200) if one.takes(torch.empty(rows, 4096))]
        assert few == [*range(2, 33), *taken]


def test_a_cpu_has_none() -> None:
    assert load_streamed_gemms(torch.device("cpu"), torch.bfloat16) is None
