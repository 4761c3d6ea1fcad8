"""Blocks of pairs against what they promise, for random routings."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.workers.kernels.expert_blocks import block_rows, expert_blocks


@given(
    tokens=st.integers(1, 40),
    top_k=st.integers(1, 4),
    num_experts=st.integers(4, 12),
    used=st.integers(1, 4),
    rows=st.sampled_from([1, 2, 4, 16]),
    seed=st.integers(0, 1000),
)
def test_every_pair_stands_once_in_a_block_of_its_expert(
    tokens: int, top_k: int, num_experts: int, used: int, rows: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    experts = torch.randint(num_experts - used, num_experts, (tokens, top_k), generator=generator)
    blocks = expert_blocks(experts, num_experts, rows)
    assert blocks.num_pairs == tokens * top_k
    assert blocks.pairs.dtype == blocks.experts.dtype == torch.int32
    seen: dict[int, list[int]] = {}
    for pairs, expert in zip(blocks.pairs.tolist(), blocks.experts.tolist(), strict=True):
        real = [pair for pair in pairs if pair < blocks.num_pairs]
        assert pairs == real + [blocks.num_pairs] * (rows - len(real))
        assert bool(real) == (expert < num_experts)
        seen.setdefault(expert, []).extend(real)
    chosen = experts.flatten().tolist()
    for expert in range(num_experts):
        assert seen.get(expert, []) == [pair for pair, one in enumerate(chosen) if one == expert]


def test_rows_of_a_block_follow_the_load() -> None:
    assert [block_rows(pairs, 8) for pairs in (1, 128, 136, 256, 264, 1024, 1032, 10**6)] == [
        *(16, 16, 32, 32),
        *(64, 64, 128, 128),
    ]
