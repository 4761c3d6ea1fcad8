"""Multi-token prediction: a further layer of the checkpoint predicts the token after the next one.

DeepSeek-V3 and GLM-4-MoE number it after the others. Qwen3-Next and Qwen3.5 have it apart, as a full-attention layer.
"""

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tandem.workers.checkpoint.errors import UnsupportedFeature
from tandem.workers.kernels.choice import choose_layer_kernels
from tandem.workers.models.blocks.cached_attention import CachedAttention
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.decoder import DenseDecoder, prepare_layer
from tandem.workers.models.parameters import LayerParameters, allocate_layer, allocators
from tandem.workers.models.weight_names import is_norm, layer_weights
from tandem.workers.models.weights import Blueprint, ReportBytes, load
from tandem.workers.weights.allocator import Forms


def mtp_config(target: ModelConfig) -> ModelConfig:
    """Makes the configuration of the layer by itself. UnsupportedFeature unless the checkpoint has one."""
    if target.num_extra_layers != 1:
        raise UnsupportedFeature(
            f"speculation.method is mtp; {target.architecture} has {target.num_extra_layers} layers for multi-token "
            "prediction: give a checkpoint with 1 (num_nextn_predict_layers or mtp_num_hidden_layers)"
        )
    if target.latent is not None and target.latent.index is not None:
        raise UnsupportedFeature(
            f"speculation.method is mtp; the layers of {target.architecture} have indexers, and only layers without "
            "are served as drafters: take ngram or draft_model"
        )
    moe, numbered = target.moe, target.extra_root is None
    if moe is not None and (numbered or 0 in moe.layers):  # the last layer has experts; one that is apart is as layer 0
        moe = dataclasses.replace(moe, layers=frozenset({0}))
    return dataclasses.replace(target, num_layers=1, num_extra_layers=0, extra_root=None, moe=moe, recurrent=None)


@dataclass(frozen=True)
class MtpNames:
    """The names of such a layer's modules in a checkpoint. copies: tensors of the target's that it stores again."""

    prefix: str  # of all its tensors, with the dot
    layer: str
    embedding_norm: str
    hidden_norm: str
    join: str
    out_norm: str
    copies: tuple[str, ...] = ()

    @classmethod
    def of(cls, target: ModelConfig) -> "MtpNames":
        """target: a config that mtp_config() takes."""
        (prefix,) = target.extra_weights
        if target.extra_root is not None:
            names, copies = ("layers.0", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"), ()
        else:
            names, copies = ("", "enorm", "hnorm", "eh_proj", "shared_head.norm"), ("embed_tokens", "shared_head.head")
        layer, embedding_norm, hidden_norm, join, out_norm = ((prefix + name).removesuffix(".") for name in names)
        stored_again = tuple(f"{prefix}{name}.weight" for name in copies)
        return cls(prefix, layer, embedding_norm, hidden_norm, join, out_norm, stored_again)

    def own(self, name: str) -> bool:
        """Whether this tensor of the checkpoint is to be read for the layer."""
        return name.startswith(self.prefix) and name not in self.copies


class MtpParameters:
    """The tensors of one such layer."""

    def __init__(self, config: ModelConfig, device: torch.device, forms: Forms) -> None:
        new, new_norm = allocators(config, device, forms)
        hidden = config.hidden_size
        self.layer: LayerParameters = allocate_layer(config, 0, new, new_norm)
        self.embedding_norm, self.hidden_norm, self.out_norm = (new_norm(hidden) for _ in range(3))
        self.join = new.linear(hidden, 2 * hidden)  # of the embedding, then the hidden state

    def named(self, config: ModelConfig, names: MtpNames, stored: Collection[str] = ()) -> dict[str, Tensor]:
        """config: what mtp_config() gives. See named_weights."""
        joined = any(name.endswith(".experts.gate_up_proj") for name in stored)
        return layer_weights(config, 0, self.layer, names.layer, joined) | {
            f"{names.embedding_norm}.weight": self.embedding_norm,
            f"{names.hidden_norm}.weight": self.hidden_norm,
            **self.join.named(names.join),
            f"{names.out_norm}.weight": self.out_norm,
        }


def load_mtp(
    folder: Path,
    config: ModelConfig,
    target: ModelConfig,
    device: torch.device,
    load_format: str = "safetensors",
    report: ReportBytes | None = None,
) -> MtpParameters:
    """config: what mtp_config() gives. On the meta device they are only checked. Raises as load_parameters, and
    UnsupportedFeature where the checkpoint has no such layer."""
    names = MtpNames.of(target)

    def allocate(stored: Collection[str], device: torch.device, forms: Forms) -> MtpParameters:
        if not stored and load_format != "dummy":
            raise UnsupportedFeature(
                f"speculation.method is mtp; {folder} has no weights {names.prefix}*, which belong to a layer for "
                "multi-token prediction: give a checkpoint with them"
            )
        return MtpParameters(config, device, forms)

    blueprint = Blueprint(allocate, lambda mtp, stored: mtp.named(config, names, stored), names.own)
    return load(folder, config, blueprint, device, load_format, report)


class MtpHead:
    """A DraftHead. Embedding and head are the target's. What it gives is normed, as what the target's head takes."""

    taps: tuple[int, ...] = ()

    def __init__(self, config: ModelConfig, parameters: MtpParameters, target: DenseDecoder) -> None:
        """Takes over filled parameters."""
        for name, weight in parameters.named(config, MtpNames.of(target.config)).items():
            if is_norm(name):
                weight.add_(config.norm_offset)
        self._kernels = choose_layer_kernels(target.device, config.dtype)
        self._eps = config.rms_norm_eps
        self._target = target
        self._norms = parameters.embedding_norm, parameters.hidden_norm, parameters.out_norm
        self._join = parameters.join.prepare()
        self._layer = prepare_layer(config, 0, parameters.layer, self._kernels, target.ranks)

    def enter(self, features: Tensor) -> Tensor:
        """See DraftHead."""
        return features

    def __call__(self, hidden: Tensor, next_ids: Tensor, cached: CachedAttention) -> Tensor:
        """See DraftHead."""
        norm, layer, (of_embedding, of_hidden, behind) = self._kernels.add_rms_norm, self._layer, self._norms
        embedded = norm(self._target.embed(next_ids), None, of_embedding, self._eps)
        x = self._join.linear(torch.cat((embedded, norm(hidden, None, of_hidden, self._eps)), 1))
        assert layer.attention is not None  # the layer has both blocks
        assert layer.o is not None
        assert layer.feed_forward is not None
        o = layer.attention(norm(x, None, layer.norms.before_attention, self._eps), 0, cached)
        delta = layer.feed_forward(norm(x, layer.o.linear(o), layer.norms.before_feed_forward, self._eps))
        return norm(x, delta, behind, self._eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """See DraftHead."""
        return self._target.logits(hidden)
