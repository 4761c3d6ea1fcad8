"""Linear layers in the form that the processor multiplies fastest."""

import torch
import torch.nn.functional as F
from torch import Tensor


class Projection:
    """x [T, in] → x · weightᵀ + bias [T, out]; weight [out, in], bias [out] or None.

    On a CPU a float32 weight is kept in oneDNN's blocked layout, as torch's own compiler does for frozen weights:
    products of 8 to 512 rows then take 10 to 30 % less time than with plain rows (tests/benchmarks/LOG.md).
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._bias = bias
        self._blocked = weight.device.type == "cpu" and weight.dtype == torch.float32 and _has_onednn()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self._blocked else weight

    def __call__(self, x: Tensor) -> Tensor:
        if self._blocked:
            return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return F.linear(x, self._weight, self._bias)


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
