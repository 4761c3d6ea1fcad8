"""Multi-token prediction (DeepSeek-V3, GLM-4-MoE): a further layer predicts the token after the next one."""

import dataclasses
from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor

from tandem.workers.checkpoint.errors import UnsupportedFeature
from tandem.workers.kernels.choice import choose_layer_kernels
from tandem.workers.models.blocks.cached_attention import CachedAttention
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.decoder import DenseDecoder, prepare_layer
from tandem.workers.models.parameters import LayerParameters, allocate_layer, allocators
from tandem.workers.models.weight_names import layer_weights
from tandem.workers.models.weights import Blueprint, ReportBytes, load
from tandem.workers.weights.allocator import Forms


def mtp_config(target: ModelConfig) -> ModelConfig:
    """Of the layer by itself. UnsupportedFeature unless the checkpoint has one."""
    if target.num_extra_layers != 1 or target.moe is None:
        raise UnsupportedFeature(
            f"speculation.method is mtp; {target.architecture} has {target.num_extra_layers} layers for multi-token "
            "prediction, and a checkpoint with 1 (num_nextn_predict_layers) is accepted"
        )
    if target.latent is not None and target.latent.index is not None:
        raise UnsupportedFeature(
            f"speculation.method is mtp; the layers of {target.architecture} have indexers, and only layers without "
            "are served as drafters: take ngram or draft_model"
        )
    moe = dataclasses.replace(target.moe, layers=frozenset({0}))  # always with experts
    return dataclasses.replace(target, num_layers=1, num_extra_layers=0, moe=moe)


class MtpParameters:
    """What a checkpoint stores under model.layers.N, N the number of the target's layers."""

    def __init__(self, config: ModelConfig, device: torch.device, forms: Forms) -> None:
        new, new_norm = allocators(config, device, forms)
        hidden = config.hidden_size
        self.layer: LayerParameters = allocate_layer(config, 0, new, new_norm)
        self.embedding_norm, self.hidden_norm, self.out_norm = (new_norm(hidden) for _ in range(3))
        self.join = new.linear(hidden, 2 * hidden)  # of the embedding, then the hidden state

    def named(self, config: ModelConfig, prefix: str, stored: Collection[str]) -> dict[str, Tensor]:
        joined = any(name.endswith(".experts.gate_up_proj") for name in stored)
        return layer_weights(config, 0, self.layer, prefix, joined) | {
            f"{prefix}.enorm.weight": self.embedding_norm,
            f"{prefix}.hnorm.weight": self.hidden_norm,
            **self.join.named(f"{prefix}.eh_proj"),
            f"{prefix}.shared_head.norm.weight": self.out_norm,
        }


def load_mtp(
    folder: Path,
    config: ModelConfig,
    index: int,
    device: torch.device,
    load_format: str = "safetensors",
    report: ReportBytes | None = None,
) -> MtpParameters:
    """index: of the layer in the checkpoint. On the meta device they are only checked. Raises as load_parameters."""
    prefix = f"model.layers.{index}"
    shared = (f"{prefix}.embed_tokens.weight", f"{prefix}.shared_head.head.weight")  # copies of the target's
    blueprint = Blueprint(
        lambda stored, device, forms: MtpParameters(config, device, forms),
        lambda mtp, stored: mtp.named(config, prefix, stored),
        lambda name: name.startswith(f"{prefix}.") and name not in shared,
    )
    return load(folder, config, blueprint, device, load_format, report)


class MtpHead:
    """A DraftHead. Embedding and head are the target's. What it gives is normed, as what the target's head takes."""

    taps: tuple[int, ...] = ()

    def __init__(self, config: ModelConfig, parameters: MtpParameters, target: DenseDecoder) -> None:
        """Takes over filled parameters."""
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
