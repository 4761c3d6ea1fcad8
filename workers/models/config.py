"""The config of a decoder, and the reader of the fields that the families share."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tandem.cache.kernels.base import GPU_HEAD_DIMS
from tandem.cache.plan.layout import DTYPES
from tandem.cache.plan.rope import RopeParameters
from tandem.cache.plan.shard import WHOLE, Shard
from tandem.cache.plan.spans import ALL, LAST, Chunk, Span, span_of
from tandem.workers.checkpoint.fields import Fields
from tandem.workers.checkpoint.shared_fields import read_heads
from tandem.workers.models.activation import Activation, is_gated, read_activation
from tandem.workers.models.compressed.fields import CompressedConfig, HyperConfig
from tandem.workers.models.latent import LatentConfig
from tandem.workers.models.moe import MoeConfig
from tandem.workers.models.recurrent.fields import RecurrentConfig
from tandem.workers.models.rope_fields import read_rope
from tandem.workers.models.window_fields import NO_WINDOWS, ChunkedConfig, Windows, read_layer_windows
from tandem.workers.sampling.posted_samples import MAX_VOCAB
from tandem.workers.weights.formats.format import AS_COMPUTED, Quantization
from tandem.workers.weights.formats.registry import read_quantization

MAX_LAYERS = 1000  # more than any model has


@dataclass(frozen=True)
class HeadShape:
    """The heads of K and V in a layer."""

    num_kv_heads: int
    head_dim: int
    replicas: int = 1  # ranks that have the same heads


@dataclass(frozen=True)
class PerLayerConfig:
    """Each layer adds to its output a gated input of its own, which follows from token and embedding (Gemma 3n, 4)."""

    vocab_size: int
    width: int


@dataclass(frozen=True)
class ModelConfig:
    """A pre-norm decoder with grouped-query attention, RoPE and a gated feed-forward, or with experts."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of the layers without experts
    num_layers: int
    num_heads: int
    num_kv_heads: int  # means nothing with latents, like head_dim, qkv_bias and qk_norm
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool  # the head is the embedding, unless the checkpoint has another
    max_position_embeddings: int
    rope: RopeParameters
    dtype: torch.dtype
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    activation: Activation
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # q and k are normalised per head
    fused_names: bool = False  # the checkpoint stores q, k, v and gate, up as one tensor each
    moe: MoeConfig | None = None  # None: no layer has experts
    float32_norms: bool = False  # norms multiply by their weights, plus norm_offset, before they round
    norm_offset: float = 0.0
    out_norms: bool = False  # attention and feed-forward have a norm after them, too
    embedding_scale: float = 1.0
    final_softcap: float | None = None  # c of c · tanh(logits / c)
    attention_sinks: bool = False  # each layer has learned logits that take part in the softmax
    layer_windows: tuple[int | None, ...] | None = None  # positions that a layer's token sees, itself too; None: all
    attn_softcap: float | None = None  # see PagedKVCache, like attn_scale
    attn_scale: float | None = None
    local_rope: RopeParameters | None = None  # of layers with a window, where theirs is another
    counts_stretch: bool = False  # max_position_embeddings is what RoPE's factor has made of the trained length
    quantization: Quantization = AS_COMPUTED  # of the checkpoint
    latent: LatentConfig | None = None  # every layer keeps latents
    chunked: ChunkedConfig | None = None  # some layers attend in chunks
    compressed: CompressedConfig | None = None  # every layer keeps K and V in one plane, some compressed entries
    hyper: HyperConfig | None = None  # the residual is several streams
    recurrent: RecurrentConfig | None = None  # some layers keep a state in place of K and V
    single_blocks: frozenset[int] | None = None  # a layer is one block: these feed-forwards, the others attend or recur
    gated_output: bool = False  # the first product of attention also makes a gate, by which o is multiplied
    attention_block: str = "self_attn"  # the submodule of a layer that attends, in weight names
    feed_forward_block: str = "mlp"  # that of a dense feed-forward
    end_names: tuple[str, str] = ("embed_tokens", "norm")  # of the embedding and of the last norm
    full_heads: HeadShape | None = None  # of the layers that see all, where theirs are others
    keys_as_values: bool = False  # v of the layers that see all is k, before that is normalised and rotated
    value_norm: bool = False  # heads of v are normalised, without a weight
    num_readers: int = 0  # of the last layers; they read K and V of the last one before them that keeps as they do
    wide_readers: bool = False  # the feed-forward of readers is twice as wide
    per_layer: PerLayerConfig | None = None  # None: layers have no inputs of their own
    layer_scalars: bool = False  # a layer's output is multiplied with a learned number
    weight_prefix: tuple[str, str] = ("", "")  # of the weight names that are read, and what it stands for
    weight_renames: tuple[tuple[str, str], ...] = ()  # patterns of weight names, and what stands for them here
    skipped_weights: tuple[str, ...] = ()  # prefixes of others, of a part that is not served
    weight_root: str = "model"  # what the weight names of its layers begin with
    self_attn_norms: bool = False  # in weight names the norms around attention are those of self_attn
    encoder: "ModelConfig | None" = None  # each layer attends to its output, too; its own eos and head mean nothing
    decoder_start_token_id: int | None = None  # with an encoder: what the decoder begins with
    num_extra_layers: int = 0  # layers for multi-token prediction that a checkpoint may hold; they can draft
    extra_root: str | None = None  # what their weight names begin with; None: they are numbered after the others
    shard: Shard = WHOLE  # whose heads and columns the numbers above count, see shard_config
    kv_replicas: int = 1  # ranks that have the same of the num_kv_heads

    @property
    def layer_spans(self) -> tuple[Span, ...]:
        """The span that each layer keeps."""
        windows = self.layer_windows or (None,) * self.num_layers
        if self.recurrent is not None:
            return tuple(LAST if layer in self.recurrent.layers else ALL for layer in range(self.num_layers))
        if self.chunked is None:
            return tuple(map(span_of, windows))
        chunk, chunked = Chunk(self.chunked.size), self.chunked.layers
        return tuple(chunk if layer in chunked else ALL for layer in range(self.num_layers))

    @property
    def extra_weights(self) -> tuple[str, ...]:
        """The beginnings of the weight names of layers for multi-token prediction."""
        if self.extra_root is not None:
            return (f"{self.extra_root}.",)
        return tuple(f"{self.weight_root}.layers.{self.num_layers + extra}." for extra in range(self.num_extra_layers))

    def has_mixer(self, layer: int) -> bool:
        """Whether it attends, or keeps a state."""
        return self.single_blocks is None or layer not in self.single_blocks

    def has_feed_forward(self, layer: int) -> bool:
        return self.single_blocks is None or layer in self.single_blocks

    def heads_of(self, layer: int) -> HeadShape:
        if self.full_heads is not None and self.layer_spans[layer] == ALL:
            return self.full_heads
        return HeadShape(self.num_kv_heads, self.head_dim, self.kv_replicas)

    @property
    def readers(self) -> dict[int, int]:
        """For each layer that stores no K and V, the layer whose K and V it reads."""
        first, spans = self.num_layers - self.num_readers, self.layer_spans
        last = {span: layer for layer, span in enumerate(spans[:first])}
        return {layer: last[spans[layer]] for layer in range(first, self.num_layers)}

    def qkv_heads(self, layer: int) -> tuple[int, ...]:
        """How many heads of q, k and v a layer's first product makes; a reader makes q alone, and v may be k. With a
        gated output each head of q has a gate after it, which counts as one more."""
        if layer in self.readers:
            return (self.num_heads,)
        kv_heads = self.heads_of(layer).num_kv_heads
        if self.keys_as_values and self.layer_spans[layer] == ALL:
            return self.num_heads, kv_heads
        return self.num_heads << self.gated_output, kv_heads, kv_heads

    def intermediate_size_of(self, layer: int) -> int:
        """Returns the intermediate size of the layer's dense feed-forward."""
        return self.intermediate_size << (self.wide_readers and layer >= self.num_layers - self.num_readers)

    @property
    def up_parts(self) -> int:
        """Matrices in a feed-forward's first product: gate and up, or up alone."""
        return 1 + is_gated(self.activation)

    @property
    def experts(self) -> range:
        """The experts that the shard holds."""
        return range(0) if self.moe is None else self.shard.some("num_experts", self.moe.num_experts)

    @property
    def head_part(self) -> range:
        """The tokens whose logits the shard computes."""
        return self.shard.some("vocab_size", self.vocab_size)

    @property
    def max_length(self) -> int:
        """Most positions of a sequence, an encoder's too."""
        return self.max_positions + (0 if self.encoder is None else self.encoder.max_length)

    @property
    def max_positions(self) -> int:
        """Most positions that are rotated, as vLLM counts them: linear and dynamic RoPE stretch
        max_position_embeddings, YaRN stretches the original length. Where another type has a factor,
        max_position_embeddings counts it already."""
        rope = self.local_rope if self.rope.rope_type == "none" and self.local_rope is not None else self.rope
        if self.counts_stretch or rope.rope_type not in ("linear", "dynamic", "yarn"):
            return self.max_position_embeddings
        stretched = rope.original_max_position_embeddings if rope.rope_type == "yarn" else None
        return int((stretched or self.max_position_embeddings) * rope.factor)

    def max_encoder_tokens(self, max_batch_tokens: int, page_size: int) -> int:
        """The longest prompt of the encoder, which one forward computes as whole pages; 0 without an encoder."""
        if self.encoder is None:
            return 0
        return min(self.encoder.max_positions, max_batch_tokens // page_size * page_size)

    @property
    def cannot_slide(self) -> str:
        """The reason why its sequences cannot slide; empty where they can."""
        if self.latent is not None and self.latent.index is not None:
            return "the model chooses positions by index keys"
        if self.compressed is not None:
            return "the model keeps compressed KV"
        if self.encoder is not None:
            return "the model has an encoder"
        if self.recurrent is not None:
            return "the model keeps recurrent states"
        return f"the model's RoPE is {self.rope.rope_type}, by length" if self.rope.by_length else ""

    @property
    def lm_head_name(self) -> str:
        return "lm_head.weight" if self.encoder is None else "lm_head.out_proj.weight"

    def stored_head_dim(self, head_dim: int) -> int:
        """Returns the head_dim of K and V in the cache: in 16 bits the least that kernels on a GPU take. The numbers
        after head_dim are zeros."""
        if self.dtype == torch.float32:
            return head_dim
        return next((size for size in GPU_HEAD_DIMS if size >= head_dim), head_dim)

    @property
    def rope_switch(self) -> int | None:
        """The length beyond which longrope takes other factors: a sequence that grew over it would need all K anew."""
        return self.rope.original_max_position_embeddings if self.rope.rope_type == "longrope" else None


def read_dense_config(
    fields: Fields,
    *,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    tie_word_embeddings: bool = False,
    attention_bias: bool | None = None,
    rms_norm_eps: float = 1e-6,
    rope: Callable[[Fields, int], RopeParameters] = read_rope,
    activation: tuple[str, str] = ("hidden_act", "silu"),
    windows: Windows = NO_WINDOWS,
    layer_types: bool = True,
) -> ModelConfig:
    """config.json as the dense families share it; the keywords are what a family takes when a field is absent.

    num_kv_heads None: the field is required. head_dim None: hidden_size / num_attention_heads when absent.
    attention_bias, of q, k, v and o, None: the family does not read it. rope: reads it, given head_dim. activation: the
    name of its field and what it is when absent. layer_types: whether the field says which layers have a window.
    Raises InvalidConfig and UnsupportedFeature.
    """
    num_heads, num_kv_heads, head_dim = _read_heads(fields, num_kv_heads, head_dim)
    biased = attention_bias is not None and fields.boolean("attention_bias", attention_bias)
    return ModelConfig(
        quantization=read_quantization(fields),
        architecture=fields.raw("architectures")[0],  # the registry has checked it
        vocab_size=fields.integer("vocab_size", minimum=1, maximum=MAX_VOCAB),
        hidden_size=fields.integer("hidden_size", minimum=1),
        intermediate_size=fields.integer("intermediate_size", minimum=1),
        num_layers=fields.integer("num_hidden_layers", minimum=1, maximum=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", rms_norm_eps),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", tie_word_embeddings),
        max_position_embeddings=fields.integer("max_position_embeddings", minimum=1),
        rope=rope(fields, head_dim),
        dtype=read_dtype(fields),
        bos_token_id=next(iter(fields.integers("bos_token_id")), None),
        eos_token_ids=fields.integers("eos_token_id"),
        activation=read_activation(fields, *activation),
        qkv_bias=biased,
        o_bias=biased,
        layer_windows=read_layer_windows(fields, windows) if layer_types else None,
    )


def _read_heads(fields: Fields, num_kv_heads: int | None, head_dim: int | None) -> tuple[int, int, int]:
    """num_heads, num_kv_heads and head_dim; the arguments are the defaults of read_dense_config."""
    hidden_size = fields.integer("hidden_size", minimum=1)
    num_heads, num_kv_heads = read_heads(fields, num_kv_heads)
    if head_dim is None and hidden_size % num_heads == 0:
        head_dim = hidden_size // num_heads
    head_dim = fields.integer("head_dim", head_dim, minimum=2)
    if head_dim % 2:
        raise fields.invalid("head_dim", "even, for RoPE rotates pairs")
    return num_heads, num_kv_heads, head_dim


def read_dtype(fields: Fields) -> torch.dtype:
    """Reads dtype (transformers 5) or torch_dtype (4); float32 when neither is given: see load_config."""
    name = "dtype" if "dtype" in fields else "torch_dtype"
    value = fields.text(name, "float32").removeprefix("torch.")
    if value not in DTYPES:
        raise fields.invalid(name, f"one of {', '.join(DTYPES)}")
    return DTYPES[value]
