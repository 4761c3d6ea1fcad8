"""The latent append kernel against torch's append and a loop over tokens: on a GPU, else in Triton's interpreter."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tandem.cache.plan.rope import Rotation
from tests.support.tolerances import assert_close

pytest.importorskip("triton")

from tandem.cache.kernels.triton.append import AppendTargets
from tandem.cache.kernels.triton.latent_append import append_latents

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGES, LAYERS, LAYER = 6, 2, 1
UNTOUCHED = 7.0


@dataclass(frozen=True)
class Case:
    heads: int = 4
    key_dim: int = 16
    rank: int = 32
    rotated: int = 8
    page_size: int = 4
    tokens: int = 5
    dtype: torch.dtype = torch.float32


CASES = {
    "small": Case(),
    "heads in several programs": Case(heads=21),
    "no powers of two": Case(heads=3, key_dim=10, rank=24, rotated=12),
    "page of 1": Case(page_size=1, tokens=3),
    "DeepSeek's": Case(heads=16, key_dim=128, rank=512, rotated=64, dtype=torch.bfloat16),
    "float16": Case(dtype=torch.float16),
}


@dataclass(frozen=True)
class Inputs:
    """Views of projections' rows, as the models make them."""

    q: Tensor
    latents: Tensor
    keys: Tensor
    rotation: Rotation
    slots: list[int]

    @classmethod
    def draw(cls, case: Case) -> "Inputs":
        generator = torch.Generator().manual_seed(3)

        def rows(*shape: int) -> Tensor:
            return torch.randn(case.tokens, *shape, generator=generator).to(DEVICE, case.dtype)

        q = rows(case.heads + 1, case.key_dim + case.rotated)[:, 1:]
        keys = rows(case.rank + case.rotated)[:, case.rank :]
        angles = torch.rand(case.tokens, 1, case.rotated // 2, generator=generator) * 6
        cos, sin = torch.cat((angles.cos(), angles.cos()), -1), torch.cat((-angles.sin(), angles.sin()), -1)
        rotation = Rotation(torch.cat((cos, sin), 1).to(DEVICE, case.dtype))
        slots = torch.randperm(PAGES * case.page_size, generator=generator)[: case.tokens]
        return cls(q, rows(case.rank), keys, rotation, slots.tolist())

    def targets(self, peer_rows: Tensor | None = None) -> AppendTargets:
        return AppendTargets(torch.tensor(self.slots, dtype=torch.int32, device=DEVICE), peer_rows)


def pool_of(case: Case) -> Tensor:
    shape = (PAGES, LAYERS, 1, 1, case.page_size, case.rank + case.rotated)
    return torch.full(shape, UNTOUCHED, dtype=case.dtype, device=DEVICE)


def filled(pool: Tensor, slots: list[int | None], entries: Tensor) -> Tensor:
    """The pool with token after token put into its slot."""
    expected = torch.full_like(pool, UNTOUCHED)
    size = pool.shape[4]
    for token, slot in enumerate(slots):
        if slot is not None:
            expected[slot // size, LAYER, 0, 0, slot % size] = entries[token, 0]
    return expected


def exact(x: Tensor, rotation: Rotation) -> Tensor:
    return Rotation(rotation.factors.double()).apply(x.double())


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_append(case: Case) -> None:
    inputs, pool = Inputs.draw(case), pool_of(case)
    before = inputs.q.clone()
    arguments = (pool, LAYER, inputs.q, inputs.latents, inputs.keys, inputs.rotation, inputs.targets())
    entries = append_latents(*arguments, keep=True)
    assert entries is not None
    assert torch.equal(inputs.q[:, :, : case.key_dim], before[:, :, : case.key_dim])
    assert_close(inputs.q[:, :, case.key_dim :], exact(before[:, :, case.key_dim :], inputs.rotation))
    assert torch.equal(entries[:, 0, : case.rank], inputs.latents)
    assert_close(entries[:, :, case.rank :], exact(inputs.keys.unsqueeze(1), inputs.rotation))
    assert torch.equal(pool, filled(pool, list(inputs.slots), entries))


def test_without_rotation_values_are_copied() -> None:
    inputs, pool = Inputs.draw(Case()), pool_of(Case())
    before = inputs.q.clone()
    targets = inputs.targets()
    assert append_latents(pool, LAYER, inputs.q, inputs.latents, inputs.keys, None, targets, keep=False) is None
    assert torch.equal(inputs.q, before)
    entries = torch.cat((inputs.latents, inputs.keys), 1).unsqueeze(1)
    assert torch.equal(pool, filled(pool, list(inputs.slots), entries))


def test_peers_receive_the_same_bits_in_one_launch() -> None:
    """Tokens 0 and 3 go to a peer with more pages; a token without an own slot goes there, too."""
    case = Case(rank=64, rotated=32, dtype=torch.bfloat16)
    inputs, pool = Inputs.draw(case), pool_of(case)
    peer = torch.cat((pool_of(case), pool_of(case)))
    to_peer = [2 * PAGES * case.page_size - 1, None, None, 2, None]
    rows = [0 if slot is None else peer[slot // 4, 0, 0, 0, slot % 4].data_ptr() for slot in to_peer]
    targets = inputs.targets(torch.tensor(rows, dtype=torch.int64, device=DEVICE))
    targets.slots[3] = -1
    own: list[int | None] = [*inputs.slots[:3], None, inputs.slots[4]]
    entries = append_latents(pool, LAYER, inputs.q, inputs.latents, inputs.keys, inputs.rotation, targets, keep=True)
    assert entries is not None
    assert torch.equal(pool, filled(pool, own, entries))
    assert torch.equal(peer, filled(peer, to_peer, entries))
