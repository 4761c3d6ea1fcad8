"""Lists the cubins that a model needs, by its config alone. What is planned in vain costs a compile; what is missing is
compiled when it is first used."""

from collections.abc import Iterator

import torch

from tandem.cache.plan.kv_scales import FP8
from tandem.workers.kernels.cuda.cubin_build import Cubin
from tandem.workers.kernels.decode_megakernel.megakernel import SCALED_COLUMNS, plan_megakernels
from tandem.workers.kernels.skinny_gemm.resident import ResidentShape, plan_resident_gemms
from tandem.workers.kernels.skinny_gemm.streamed import plan_streamed_gemms
from tandem.workers.models.activation import Silu
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.small_batch_decoder import megakernel_shape


def plan_cubins(
    model: ModelConfig, stored: torch.dtype, capability: tuple[int, int], multiprocessors: int
) -> Iterator[tuple[str, Cubin]]:
    """Yields the purpose of each cubin, and its source.

    stored: dtype of K and V in their pages. capability, multiprocessors: of the GPU.
    """
    streamed = plan_streamed_gemms(model.dtype, capability)
    if streamed is not None:
        yield "skinny GEMMs, streamed", streamed
    weights = _layer_dtype(model)
    if not _is_plain(model) or weights is None:
        return
    shape = megakernel_shape(model, stored, weights)
    for rows, cubin in plan_megakernels(shape, capability, multiprocessors).items():
        yield f"decode megakernel of {rows} rows", cubin
    if weights != model.dtype:
        return
    heads, kv_heads = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    shape = ResidentShape(model.hidden_size, model.intermediate_size, heads, heads + 2 * kv_heads, model.dtype)
    resident = None if model.qkv_bias else plan_resident_gemms(shape, capability, multiprocessors)
    if resident is not None:
        yield "skinny GEMMs, resident", resident


def _layer_dtype(model: ModelConfig) -> torch.dtype | None:
    """Returns the dtype of the layers' weights in memory. None: they are in 8 bits by blocks that the decode megakernel
    does not take."""
    quantization = model.quantization
    if quantization.weights != "fp8":
        return model.dtype
    return FP8 if quantization.block is None or quantization.block[1] == SCALED_COLUMNS else None


def _is_plain(model: ModelConfig) -> bool:
    """Whether SmallBatchDecoder computes all layers by kernels of its own."""
    others = (model.moe, model.latent, model.attention_sinks, model.o_bias, model.mlp_bias, model.out_norms)
    same = model.stored_head_dim(model.head_dim) == model.head_dim and isinstance(model.activation, Silu)
    return same and not any(others) and not model.float32_norms
