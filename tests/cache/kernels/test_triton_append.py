"""The append kernel against rotation in float64 and a loop over tokens: on a GPU, else in Triton's interpreter."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.cache.kernels.fp8_entries import Fp8Entries
from tandem.cache.kinds.kv import KV
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.kv_scales import FP8, KVScales
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.rope import Rotation
from tests.cache.rounding import e4m3_values
from tests.support.tolerances import assert_close

pytest.importorskip("triton")

from tandem.cache.kernels.triton.append import AppendTargets, append

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGES, LAYERS, LAYER = 6, 2, 1
UNTOUCHED = 7.0


@dataclass(frozen=True)
class Case:
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    rotary_dim: int | None = None  # None: all
    page_size: int = 4
    tokens: int = 5
    dtype: torch.dtype = torch.float32


CASES = {
    "GQA": Case(),
    "MHA": Case(q_heads=2),
    "MQA": Case(kv_heads=1),
    "heads in several programs": Case(q_heads=24, kv_heads=12),
    "heads no power of two": Case(q_heads=9, kv_heads=3),
    "partial rotary": Case(rotary_dim=8),
    "rotary no power of two": Case(head_dim=32, rotary_dim=12),
    "head_dim 24": Case(head_dim=24),
    "page of 1": Case(page_size=1, tokens=3),
    "float16": Case(head_dim=64, dtype=torch.float16),
    "bfloat16": Case(head_dim=64, dtype=torch.bfloat16),
}


@dataclass(frozen=True)
class Inputs:
    """q, k, v as views of one projection's rows, as the models make them."""

    q: Tensor
    k: Tensor
    v: Tensor
    rotation: Rotation
    slots: np.ndarray

    @classmethod
    def draw(cls, case: Case) -> "Inputs":
        generator = torch.Generator().manual_seed(3)
        rows = torch.randn(case.tokens, case.q_heads + 2 * case.kv_heads, case.head_dim, generator=generator)
        q, k, v = rows.to(DEVICE, case.dtype).split((case.q_heads, case.kv_heads, case.kv_heads), 1)
        angles = torch.rand(case.tokens, 1, (case.rotary_dim or case.head_dim) // 2, generator=generator) * 6
        cos = torch.cat((angles.cos(), angles.cos()), -1)
        sin = torch.cat((-angles.sin(), angles.sin()), -1)
        factors = torch.cat((cos, sin), 1).to(DEVICE, case.dtype)
        slots = torch.randperm(PAGES * case.page_size, generator=generator)[: case.tokens]
        return cls(q, k, v, Rotation(factors), slots.numpy().astype(np.int32))


def pool_of(case: Case) -> Tensor:
    shape = (PAGES, LAYERS, 2, case.kv_heads, case.page_size, case.head_dim)
    return torch.full(shape, UNTOUCHED, dtype=case.dtype, device=DEVICE)


def peer_rows(pool: Tensor, slots: list[int | None]) -> Tensor:
    """Computes AppendTargets.peer_rows from its definition."""
    addresses = [
        0 if slot is None else pool[slot // pool.shape[4], 0, 0, 0, slot % pool.shape[4]].data_ptr() for slot in slots
    ]
    return torch.tensor(addresses, dtype=torch.int64, device=DEVICE)


def expected_pool(case: Case, slots: list[int | None], k: Tensor, v: Tensor) -> Tensor:
    pool = pool_of(case)
    for token, slot in enumerate(slots):
        if slot is not None:
            pool[slot // case.page_size, LAYER, 0, :, slot % case.page_size] = k[token]
            pool[slot // case.page_size, LAYER, 1, :, slot % case.page_size] = v[token]
    return pool


def rotated(x: Tensor, rotation: Rotation) -> Tensor:
    return Rotation(rotation.factors.double()).apply(x.double())


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_append(case: Case) -> None:
    inputs, pool = Inputs.draw(case), pool_of(case)
    targets = AppendTargets(torch.from_numpy(inputs.slots).to(DEVICE), None)
    q, k = append(pool, LAYER, inputs.q, inputs.k, inputs.v, inputs.rotation, targets, keep_k=True)
    assert q.is_contiguous()
    assert_close(q, rotated(inputs.q, inputs.rotation))
    assert_close(k, rotated(inputs.k, inputs.rotation))
    assert torch.equal(pool, expected_pool(case, inputs.slots.tolist(), k, inputs.v))


def test_without_rotation_values_are_copied() -> None:
    case = Case(head_dim=24)
    inputs, pool = Inputs.draw(case), pool_of(case)
    targets = AppendTargets(torch.from_numpy(inputs.slots).to(DEVICE), None)
    q, k = append(pool, LAYER, inputs.q, inputs.k, inputs.v, None, targets, keep_k=False)
    assert torch.equal(q, inputs.q)
    assert k is inputs.k
    assert torch.equal(pool, expected_pool(case, inputs.slots.tolist(), inputs.k, inputs.v))


def test_peers_receive_the_same_bits_in_one_launch() -> None:
    """Tokens 0 and 3 go to one peer, 1 to another with more pages, 2 and 4 stay."""
    case = Case(head_dim=64, rotary_dim=32, dtype=torch.bfloat16)
    inputs, pool, first = Inputs.draw(case), pool_of(case), pool_of(case)
    second = torch.cat((pool_of(case), pool_of(case)))
    to_first, to_second = [9, None, None, 2, None], [None, 2 * PAGES * case.page_size - 1, None, None, None]
    targets = AppendTargets(
        torch.from_numpy(inputs.slots).to(DEVICE), peer_rows(first, to_first) + peer_rows(second, to_second)
    )
    _, k = append(pool, LAYER, inputs.q, inputs.k, inputs.v, inputs.rotation, targets, keep_k=True)
    assert torch.equal(pool, expected_pool(case, inputs.slots.tolist(), k, inputs.v))
    assert torch.equal(first, expected_pool(case, to_first, k, inputs.v))
    assert torch.equal(second[-1, LAYER, :, :, -1], torch.stack((k[1], inputs.v[1])))
    assert int((second != UNTOUCHED).sum()) <= 2 * case.kv_heads * case.head_dim


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("keep_k", [False, True])
def test_fp8_entries_are_those_of_torch_here_and_at_the_peer(rotate: bool, keep_k: bool) -> None:
    """Triton's interpreter rounds wrongly: there the numbers are such that nothing needs rounding."""
    case = Case(head_dim=64, dtype=torch.bfloat16)
    inputs = Inputs.draw(case)
    entries = fp8_entries(case)
    k, v, rotation = inputs.k, inputs.v, inputs.rotation if rotate else None
    if DEVICE == "cpu":
        k, v = (representable(x, entries.scales[LAYER, which]) for which, x in enumerate((k, v)))
        quarter = torch.tensor([0.0, 1.0]).repeat_interleave(case.head_dim // 2).to(inputs.rotation.cos)
        rotation = Rotation(torch.stack((quarter, quarter.flip(0))).expand(5, 2, -1)) if rotate else None
    pool = torch.zeros(PAGES, LAYERS, 2, case.kv_heads, case.page_size, case.head_dim, device=DEVICE).to(FP8)
    peer = torch.cat((pool, pool))
    targets = AppendTargets(
        torch.from_numpy(inputs.slots).to(DEVICE), peer_rows(peer, [9, None, 2 * PAGES * case.page_size - 1, 3, None])
    )
    factors = entries.inverse[LAYER]
    _, kept = append(pool, LAYER, inputs.q, k, v, rotation, targets, keep_k=keep_k, fp8_factors=factors)
    if rotation is not None:
        _, k_rotated = append(
            torch.zeros_like(pool, dtype=case.dtype), LAYER, inputs.q, k, v, rotation, targets_of(5), keep_k=True
        )
    else:
        k_rotated = k
    assert kept is k or torch.equal(kept, k_rotated)
    k_entries, v_entries = (x.view(torch.uint8) for x in entries.quantise(LAYER, k_rotated, v))
    stored, at_peer = pool.view(torch.uint8), peer.view(torch.uint8)
    for token, slot in enumerate(inputs.slots.tolist()):
        assert torch.equal(stored[slot // 4, LAYER, 0, :, slot % 4], k_entries[token])
        assert torch.equal(stored[slot // 4, LAYER, 1, :, slot % 4], v_entries[token])
    for token, slot in ((0, 9), (2, 2 * PAGES * 4 - 1), (3, 3)):
        assert torch.equal(at_peer[slot // 4, LAYER, 0, :, slot % 4], k_entries[token])
        assert torch.equal(at_peer[slot // 4, LAYER, 1, :, slot % 4], v_entries[token])
    assert int((at_peer != 0).any(-1).sum()) == 3 * 2 * case.kv_heads


def targets_of(tokens: int) -> AppendTargets:
    return AppendTargets(torch.full((tokens,), -1, dtype=torch.int32, device=DEVICE), None)


def fp8_entries(case: Case) -> Fp8Entries:
    """Powers of two, by which nothing is rounded; the second head saturates."""
    group = LayerGroup(tuple(range(LAYERS)), KV(case.kv_heads, case.head_dim))
    scales = KVScales(((1.0,), (1 / 32, 1 / 1024)), ((1.0,), (1 / 64, 1 / 2048)))
    entries = Fp8Entries.of_group(KVLayout((group,), case.page_size, case.dtype, scales), 0, torch.device(DEVICE))
    assert entries is not None
    return entries


def representable(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Numbers like x [T, heads, dim] that are entries times scales [heads], or too large for that."""
    values = e4m3_values().float()[8:]  # Triton's interpreter does not take subnormal ones well
    nearest = (x.float().abs() / scales[:, None]).unsqueeze(-1).sub(values).abs().argmin(-1)
    entries = values[nearest].copysign(x.float())
    return (torch.where(entries.abs() == 448, entries * 8, entries) * scales[:, None]).to(x.dtype)
