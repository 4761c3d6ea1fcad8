"""The dense pre-norm decoder that Llama, Mistral, Qwen 2 and Qwen 3 share."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.workers.kernels.base import LayerKernels
from tandem.workers.kernels.choice import choose_layer_kernels
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.parameters import DecoderParameters, LayerParameters
from tandem.workers.models.projection import Projection

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D]) -> o [T, Hq, D]. Rotates, keeps K and V, and attends."""


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer as it is run. qk_norm: the norm weights of all q and k heads [Hq + Hkv, D], or None."""

    input_norm: Tensor
    qkv: Projection
    qk_norm: Tensor | None
    o: Projection
    post_norm: Tensor
    gate_up: Projection
    down: Projection


class DenseDecoder:
    """Call forward under torch.inference_mode."""

    def __init__(self, config: ModelConfig, parameters: DecoderParameters, kernels: LayerKernels | None = None) -> None:
        """Takes over filled `parameters` and empties their list of layers, so that no weight is held twice.

        kernels: None takes the fastest for the parameters' device.
        """
        self.config = config
        self._kernels = kernels or choose_layer_kernels(parameters.embedding.device, config.dtype)
        self._embedding = parameters.embedding
        self._final_norm = parameters.final_norm
        tied = (
            parameters.lm_head is parameters.embedding
        )  # the embedding needs plain rows; a CPU would make a second copy
        self._lm_head = (
            partial(F.linear, weight=parameters.lm_head)
            if tied and self.device.type == "cpu"
            else Projection(parameters.lm_head, None)
        )
        self._layers: list[DecoderLayer] = []
        while parameters.layers:
            self._layers.append(_prepare(config, parameters.layers.pop(0)))

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    def forward(self, token_ids: Tensor, attend: Attend, last_rows: Tensor | None) -> Tensor:
        """Logits float32 [n, vocab_size] that follow rows `last_rows` (int64 [n], n may be 0) of the packed tokens.

        token_ids: int64 [T], the new tokens of all sequences of the batch one after another. last_rows None: all T.
        """
        kernels, eps = self._kernels, self.config.rms_norm_eps
        x, delta = F.embedding(token_ids, self._embedding), None
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(kernels.add_rms_norm(x, delta, layer.input_norm, eps))
            o = attend(index, *self._split_heads(qkv, layer.qk_norm)).flatten(1)
            if last_rows is not None and index == self.config.num_layers - 1:
                if last_rows.shape[0] == 0:  # all K and V are kept: from here on only last_rows matter
                    return torch.empty((0, self.config.vocab_size), dtype=torch.float32, device=x.device)
                x, o = x.index_select(0, last_rows), o.index_select(0, last_rows)
            gate_up = layer.gate_up(kernels.add_rms_norm(x, layer.o(o), layer.post_norm, eps))
            delta = layer.down(kernels.silu_mul(gate_up))
        return self._lm_head(kernels.add_rms_norm(x, delta, self._final_norm, eps)).float()

    def _split_heads(self, qkv: Tensor, qk_norm: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, Hq, D], k and v [T, Hkv, D] of qkv [T, (Hq + 2·Hkv)·D]; views, rows of one stride."""
        config = self.config
        heads = qkv.view(qkv.shape[0], -1, config.head_dim)
        if qk_norm is None:
            q, k, v = heads.split_with_sizes((config.num_heads, config.num_kv_heads, config.num_kv_heads), 1)
        else:
            qk, v = heads.split_with_sizes((qk_norm.shape[0], config.num_kv_heads), 1)
            qk = self._kernels.norm_heads(qk, qk_norm, config.rms_norm_eps)
            q, k = qk.split_with_sizes((config.num_heads, config.num_kv_heads), 1)
        return q, k, v


def _prepare(config: ModelConfig, layer: LayerParameters) -> DecoderLayer:
    return DecoderLayer(
        input_norm=layer.input_norm,
        qkv=Projection(layer.qkv, layer.qkv_bias),
        qk_norm=_join_qk_norm(config, layer.q_norm, layer.k_norm),
        o=Projection(layer.o, layer.o_bias),
        post_norm=layer.post_norm,
        gate_up=Projection(layer.gate_up, layer.gate_up_bias),
        down=Projection(layer.down, layer.down_bias),
    )


def _join_qk_norm(config: ModelConfig, q_norm: Tensor | None, k_norm: Tensor | None) -> Tensor | None:
    """The norm weights of all q and k heads, [Hq + Hkv, D], so that one call normalises both."""
    if q_norm is None or k_norm is None:
        return None
    shape = (config.head_dim,)
    return torch.cat([q_norm.expand(config.num_heads, *shape), k_norm.expand(config.num_kv_heads, *shape)])
