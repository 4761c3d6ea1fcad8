"""The sizes of latent attention (DeepSeek-V2), and how config.json gives them."""

from dataclasses import dataclass

from tandem.cache.plan.latent import LatentHeads
from tandem.workers.checkpoint.fields import Fields
from tandem.workers.models.indexer.fields import IndexConfig


@dataclass(frozen=True)
class LatentConfig:
    """See tandem.cache.plan.latent."""

    rank: int  # of an entry: the latent
    rotated: int  # of an entry: the key that heads share
    heads: LatentHeads
    q_rank: int | None  # numbers between the two maps that make q; None: one map makes q
    interleaved: bool  # the checkpoint's RoPE rotates neighbours, not halves
    bias: bool  # of the maps from the hidden state
    index: IndexConfig | None = None  # by which queries choose positions; None: they attend to all

    @property
    def query_dim(self) -> int:
        return self.heads.key_dim + self.rotated


def read_latent(fields: Fields, *, interleaved: bool) -> LatentConfig:
    """Raises InvalidConfig."""
    rotated = fields.integer("qk_rope_head_dim", 64, minimum=2)
    if rotated % 2:
        raise fields.invalid("qk_rope_head_dim", "even, for RoPE rotates pairs")
    heads = LatentHeads(
        key_dim=fields.integer("qk_nope_head_dim", 128, minimum=1),
        value_dim=fields.integer("v_head_dim", 128, minimum=1),
    )
    # Null says that there is one map; absent is transformers' default.
    absent = 1536 if "q_lora_rank" not in fields.names() else None
    q_rank = fields.integer("q_lora_rank", absent, minimum=1) if absent or "q_lora_rank" in fields else None
    rank = fields.integer("kv_lora_rank", 512, minimum=1)
    return LatentConfig(rank, rotated, heads, q_rank, interleaved, fields.boolean("attention_bias", False))
