"""EAGLE-3 heads (arXiv:2503.01840): one layer drafts from the inputs of three of the target's."""

import dataclasses
from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor

from tandem.workers.checkpoint.errors import InvalidConfig, InvalidWeights, UnsupportedFeature
from tandem.workers.checkpoint.fields import Fields
from tandem.workers.checkpoint.safetensors_file import SafetensorsFile
from tandem.workers.checkpoint.stored import read_bytes
from tandem.workers.checkpoint.weight_files import weight_files
from tandem.workers.kernels.choice import choose_layer_kernels
from tandem.workers.models.blocks.cached_attention import CachedAttention
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.decoder import DenseDecoder, prepare_layer
from tandem.workers.models.families.llama import read_llama
from tandem.workers.models.parameters import AttentionParameters, LayerParameters, allocate_layer, allocators
from tandem.workers.models.weight_names import layer_weights
from tandem.workers.models.weights import Blueprint, ReportBytes, load
from tandem.workers.weights.allocator import Forms
from tandem.workers.weights.weight import Weight

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
LAYER, EMBEDDING, OFFSETS = "midlayer", "embed_tokens.weight", "d2t"
UNUSED = ("t2d",)  # which of the target's tokens have an id of their own: d2t says it, too


def eagle3_config(folder: Path, target: ModelConfig) -> ModelConfig:
    """Reads the configuration of the head's layer. Its vocab_size is the drafts'. Raises ModelError."""
    fields = Fields.from_file(folder / "config.json")
    architecture = next(iter(fields.raw("architectures") or ()), None)
    if architecture not in ARCHITECTURES:
        raise fields.invalid("architectures", f"an EAGLE-3 head, {' or '.join(ARCHITECTURES)}")
    config = read_llama(fields)
    for name in ("vocab_size", "hidden_size"):
        own, wanted = getattr(config, name), getattr(target, name)
        if own != wanted:
            raise InvalidConfig(f"{folder}: {name} is {own}; it must be that of the target, {wanted}")
    if config.num_layers != 1 or "eagle_config" in fields:
        named = "eagle_config" if config.num_layers == 1 else f"num_hidden_layers {config.num_layers}"
        raise UnsupportedFeature(f"{folder} has {named}; it must be a head of one layer, which takes the usual three")
    low, middle, high = taps_of(target)
    if not low < middle < high:
        raise UnsupportedFeature(
            f"speculation.method is eagle3; {target.architecture} has {target.num_layers} layers, and a head takes "
            "three of 7 or more"
        )
    drafts = fields.integer("draft_vocab_size", config.vocab_size, minimum=1, maximum=config.vocab_size)
    return dataclasses.replace(config, dtype=target.dtype, vocab_size=drafts)


def taps_of(target: ModelConfig) -> tuple[int, ...]:
    """The layers whose inputs a head takes, as its authors choose them."""
    return 2, target.num_layers // 2, target.num_layers - 3


class Eagle3Parameters:
    """The tensors of a head. embedding: None where it takes the target's."""

    def __init__(self, config: ModelConfig, device: torch.device, forms: Forms) -> None:
        new, new_norm = allocators(config, device, forms)
        hidden = config.hidden_size
        layer = allocate_layer(config, 0, new, new_norm)
        assert isinstance(layer.attention, AttentionParameters)
        qkv = new.linear(layer.attention.qkv.rows, 2 * hidden, biased=config.qkv_bias)
        attention = dataclasses.replace(layer.attention, qkv=qkv)
        self.layer: LayerParameters = dataclasses.replace(layer, attention=attention)
        self.join = new.linear(hidden, 3 * hidden)
        self.hidden_norm, self.out_norm = new_norm(hidden), new_norm(hidden)
        self.lm_head = new.dense(config.vocab_size, hidden)
        self.embedding: Weight | None = None
        self.ids = torch.arange(config.vocab_size)  # of the target, for each of the head's
        self._new = new

    def named(self, config: ModelConfig, target: ModelConfig, stored: Collection[str]) -> dict[str, Tensor]:
        """Makes the embedding where one is stored."""
        weights = layer_weights(config, 0, self.layer, LAYER, joined=False) | {
            f"{LAYER}.hidden_norm.weight": self.hidden_norm,
            **self.join.named("fc"),
            "norm.weight": self.out_norm,
            **self.lm_head.named("lm_head"),
        }
        if EMBEDDING in stored:
            self.embedding = self._new.dense(target.vocab_size, config.hidden_size)
            weights |= self.embedding.named(EMBEDDING.removesuffix(".weight"))
        return weights


def load_eagle3(
    folder: Path,
    config: ModelConfig,
    target: ModelConfig,
    device: torch.device,
    load_format: str = "safetensors",
    report: ReportBytes | None = None,
) -> Eagle3Parameters:
    """Loads the parameters. On the meta device they are only checked. Raises as load_parameters."""
    blueprint = Blueprint(
        lambda stored, device, forms: Eagle3Parameters(config, device, forms),
        lambda head, stored: head.named(config, target, stored),
        lambda name: name not in (OFFSETS, *UNUSED),
    )
    head = load(folder, config, blueprint, device, load_format, report)
    if load_format != "dummy" and config.vocab_size < target.vocab_size:
        head.ids = head.ids + _read_offsets(folder, config.vocab_size)
        if not 0 <= int(head.ids.min()) <= int(head.ids.max()) < target.vocab_size:
            raise InvalidWeights(f"{folder}: {OFFSETS} leads beyond the target's {target.vocab_size} tokens")
    return head


def _read_offsets(folder: Path, count: int) -> Tensor:
    """int64 [count]: what is added to each id of the head for the target's."""
    for path in weight_files(folder):
        with SafetensorsFile(path) as file:
            stored = file.tensors.get(OFFSETS)
            if stored is None:
                continue
            if (stored.dtype_name, stored.shape, stored.num_bytes) != ("I64", (count,), 8 * count):
                raise InvalidWeights(
                    f"{path}: tensor {OFFSETS} is {stored.dtype_name} {list(stored.shape)}; it must be I64 [{count}]"
                )
            return read_bytes(file, stored.begin, stored.num_bytes).view(torch.int64)
    raise InvalidWeights(f"{folder} lacks {OFFSETS}, which a draft_vocab_size of {count} asks for")


class Eagle3Head:
    """A DraftHead. The layer attends with the embedding next to the hidden state."""

    def __init__(self, config: ModelConfig, parameters: Eagle3Parameters, target: DenseDecoder) -> None:
        """Takes over filled parameters."""
        self.taps = taps_of(target.config)
        self._kernels = choose_layer_kernels(target.device, config.dtype)
        self._eps = config.rms_norm_eps
        self._embed = target.embed if parameters.embedding is None else parameters.embedding.look_up
        self._join = parameters.join.prepare()
        self._hidden_norm, self._out_norm = parameters.hidden_norm, parameters.out_norm
        self._lm_head = parameters.lm_head.prepare()
        self._layer = prepare_layer(config, 0, parameters.layer, self._kernels, target.ranks)
        self._vocab = target.config.vocab_size
        self._ids = None if config.vocab_size == self._vocab else parameters.ids.to(target.device)

    def enter(self, features: Tensor) -> Tensor:
        """See DraftHead."""
        return self._join.linear(features)

    def __call__(self, hidden: Tensor, next_ids: Tensor, cached: CachedAttention) -> Tensor:
        """See DraftHead."""
        norm, layer = self._kernels.add_rms_norm, self._layer
        embedded = norm(self._embed(next_ids), None, layer.norms.before_attention, self._eps)
        normed = norm(hidden, None, self._hidden_norm, self._eps)
        assert layer.attention is not None  # the layer has both blocks
        assert layer.o is not None
        assert layer.feed_forward is not None
        o = layer.attention(torch.cat((embedded, normed), 1), 0, cached)
        delta = layer.feed_forward(norm(hidden, layer.o.linear(o), layer.norms.before_feed_forward, self._eps))
        norm(hidden, delta, self._out_norm, self._eps)  # adds delta to it
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """See DraftHead. Tokens without an id of the head get the least number there is."""
        logits = self._lm_head.linear(self._kernels.add_rms_norm(hidden, None, self._out_norm, self._eps))
        if self._ids is None:
            return logits
        least = torch.finfo(logits.dtype).min
        return logits.new_full((hidden.shape[0], self._vocab), least).index_copy_(1, self._ids, logits)
