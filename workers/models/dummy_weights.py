"""Random weights, for models without a checkpoint."""

from collections.abc import Mapping

import torch
from torch import Tensor

from tandem.workers.kernels.packed_linear import ZERO
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.weight_names import is_factor, is_norm

STD = 0.02
FP8_STD = 64.0  # of numbers in 8 bits; their scales make up for it
INT4_STD = 4.6  # of any number in 4 bits
EXPONENT = 120  # of 2^-7: E2M1's numbers are about 3


def fill_randomly(config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
    """Norms and factors 1, biases 0, integers any expert, the rest normal by STD; the same on the same device."""
    for index, (name, weight) in enumerate(weights.items()):
        generator = torch.Generator(weight.device).manual_seed(index)
        if is_norm(name):
            weight.fill_(1 - config.norm_offset)
        elif is_factor(name):
            weight.fill_(1)
        elif name.endswith(".bias"):
            weight.zero_()
        elif name.endswith(".weight_scale"):
            weight.fill_(STD / FP8_STD)
        elif weight.dtype == torch.uint8 and name.endswith("numbers"):
            weight.random_(0, 256, generator=generator)
        elif name.endswith("zeros"):
            weight.fill_(ZERO)
        elif name.endswith("scales"):
            weight.fill_(EXPONENT if weight.dtype == torch.uint8 else STD / INT4_STD)
        elif weight.dtype == torch.int64 and config.moe is not None:
            weight.random_(0, config.moe.num_experts, generator=generator)
        elif weight.dtype == torch.float8_e4m3fn:
            weight.copy_(torch.empty_like(weight, dtype=torch.float32).normal_(0, FP8_STD, generator=generator))
        else:
            weight.normal_(0, STD, generator=generator)
