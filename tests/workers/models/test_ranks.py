"""Checks that several ranks together, each with its shard of the weights, equal transformers: every family."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.shard import Shard
from tandem.workers.checkpoint.errors import UnsupportedFeature
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.registry import load_config
from tandem.workers.models.sharding import shard_config
from tandem.workers.models.weights import load_decoder
from tests.support.checkpoints import CASES, make_model, save_checkpoint, sizes_for_ranks
from tests.support.oracle import load_oracle, random_prompt
from tests.support.thread_ranks import ThreadRank, on_all, thread_ranks
from tests.workers.reference_attention import ReferenceAttention, Sequence

FLOAT32 = 1e-4


@torch.inference_mode()
def logits_of(folder: Path, config: ModelConfig, prompt: list[int], rank: ThreadRank) -> Tensor:
    of_shard = shard_config(config, Shard(rank.rank, rank.size))
    decoder, attention = load_decoder(folder, of_shard, ranks=rank), ReferenceAttention(of_shard)
    attention.batch = [(Sequence(len(prompt)), len(prompt))]
    return decoder.forward(torch.tensor(prompt), attention, None)


@pytest.mark.parametrize(
    ("case", "size"), [(case, size) for case in CASES for size in (2, 4) if size == 2 or "deepseek_v4" not in case]
)
def test_ranks_give_the_logits_of_transformers(case: str, size: int, tmp_path: Path) -> None:
    make_model(case, **sizes_for_ranks(case, size)).save_pretrained(tmp_path)
    prompt, config = random_prompt(40, 3), load_config(tmp_path, "float32")
    with torch.inference_mode():
        expected = load_oracle(tmp_path)(torch.tensor([prompt])).logits[0]
    found = on_all([partial(logits_of, tmp_path, config, prompt, rank) for rank in thread_ranks(size)])
    assert all(torch.equal(found[0], one) for one in found)
    torch.testing.assert_close(found[0], expected, rtol=FLOAT32, atol=FLOAT32)


def test_groups_of_heads_that_ranks_cannot_divide_are_named(tmp_path: Path) -> None:
    config = load_config(save_checkpoint("deepseek_v4", tmp_path), "float32")
    with pytest.raises(InvalidArgument, match="out_groups is 2; it must be a multiple of the 4 ranks"):
        shard_config(config, Shard(0, 4))


def test_a_decoder_refuses_another_rank_than_its_shards(tmp_path: Path) -> None:
    config = shard_config(load_config(save_checkpoint("qwen3", tmp_path), "float32"), Shard(1, 2))
    with pytest.raises(UnsupportedFeature, match="shard is rank 1 of 2; it must be that of this worker, rank 0 of 2"):
        load_decoder(tmp_path, config, ranks=thread_ranks(2)[0])
