"""Checks what the GPU kernels refuse, and their arithmetic on the host. tests/gpu checks what they compute."""

import numpy as np
import pytest
import torch

from tandem.cache.kernels.base import QKV, DeviceTables, GroupPlan
from tandem.cache.kernels.scoring import Scoring
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.rope import Rotation

pytest.importorskip("triton")

from tandem.cache.kernels.flashinfer.kernels import FlashInferKernels
from tandem.cache.kernels.flashinfer.latent import FlashInferLatentKernels
from tandem.cache.kernels.flashinfer.parts import all_slots
from tandem.cache.kernels.flashinfer.sharing import largest_decode
from tandem.cache.kernels.paged import steps
from tandem.cache.kernels.paged.steps import DecodeSteps
from tandem.cache.kernels.triton.decode_plan import DecodePlan
from tandem.cache.plan.latent import LatentHeads


@pytest.mark.parametrize(
    ("dtype", "head_dim", "page_size", "message"),
    [
        (torch.float32, 128, 16, "dtype is torch.float32; .* torch.float16, torch.bfloat16"),
        (torch.bfloat16, 96, 16, "head_dim is 96; .* 64, 128, 256"),
        (torch.bfloat16, 128, 128, "page_size is 128; .* 8, 16, 32, 64"),
        (torch.bfloat16, 128, 16, "the pool is on cpu"),
    ],
)
def test_refused(dtype: torch.dtype, head_dim: int, page_size: int, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        FlashInferKernels(torch.empty(1, 1, 2, 1, page_size, head_dim, dtype=dtype), Scoring(1.0))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tile", "most"),
    [(96, 8, 16, 193), (32, 8, 16, 812), (64, 8, 16, 338), (64, 1, 64, 63), (128, 1, 128, 15), (256, 1, 128, 5)],
)
def test_rows_that_fit_into_the_workspace(heads: int, kv_heads: int, tile: int, most: int) -> None:
    """FlashInfer keeps partial outputs and log-sum-exps for ceil(rows · queries / tile) + rows - 1 tiles of a head."""
    workspace, queries = 256 << 20, heads // kv_heads

    def taken(rows: int) -> int:
        return heads * (-(-rows * queries // tile) + rows - 1) * tile * (128 + 1) * 4

    assert largest_decode(workspace, (heads, kv_heads, 128, 16)) == most
    assert taken(most) <= workspace
    assert taken(most + 2) > workspace


def test_slots_of_all_positions() -> None:
    """Sequences of 5, 8 and 1 positions on pages of 4."""
    pages = np.array([7, 2, 0, 9, 3], np.int32)
    slots = all_slots(pages, np.array([2, 2, 1], np.int32), np.array([5, 8, 1], np.int32), page_size=4)
    assert slots.dtype == np.int32
    assert slots.tolist() == [28, 29, 30, 31, 8, 0, 1, 2, 3, 36, 37, 38, 39, 12]


@pytest.mark.parametrize(
    ("width", "rank", "heads", "message"),
    [
        (576, 256, LatentHeads(128, 128), "latent_rank is 256; .* 512"),
        (528, 512, LatentHeads(128, 128), "the rotated part is 16; .* 64"),
        (576, 512, LatentHeads(160, 128), "key_dim is 160; .* 128, 192"),
        (576, 512, LatentHeads(192, 128), "value_dim is 128; .* 256"),
        (576, 512, LatentHeads(128, 64), "value_dim is 64; .* 128"),
        (576, 512, LatentHeads(128, 128), "the pool is on cpu"),
    ],
)
def test_latents_refused(width: int, rank: int, heads: LatentHeads, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        FlashInferLatentKernels(torch.empty(1, 1, 1, 1, 16, width, dtype=torch.bfloat16), 1.0, rank, heads)


def test_a_graph_is_scheduled_unless_a_megakernel_computed_the_step_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each forward is one before the capture, or the capture; a megakernel may refuse the pages that it was given."""
    scheduled: list[DecodePlan] = []
    monkeypatch.setattr(steps, "schedule_splits", lambda plan, *_: scheduled.append(plan))
    monkeypatch.setattr(steps, "decode", lambda pool, layer, q, *_: q)
    backend = object.__new__(FlashInferKernels)  # without a GPU
    backend._pool, backend._fp8, backend.scoring = torch.empty(1, 1, 2, 1, 16, 64), None, Scoring(1.0)
    tables = DeviceTables(*(torch.zeros(size, dtype=torch.int32) for size in (1, 2, 1, 4)))
    own = DecodeSteps(backend, DecodePlan.make(tables, 1, 1, 64))
    plan = GroupPlan(own, Rotation(torch.zeros(1, 2, 64)), captured=True)
    head = torch.zeros(1, 1, 64)
    x = QKV(head, head, head)

    def forward(*, asks: bool, attends: bool) -> bool:
        """Whether its graph is scheduled."""
        scheduled.clear()
        own.begin_captured()
        assert not asks or own.step_pages(plan, range(1)) is not None
        if attends:
            own.run(plan, 0, x)
        return bool(scheduled)

    assert forward(asks=True, attends=True)
    assert forward(asks=True, attends=True)
    assert forward(asks=True, attends=False)
    assert not forward(asks=True, attends=False)
    with pytest.raises(AssertionError, match="has queued no schedule"):
        forward(asks=False, attends=True)
