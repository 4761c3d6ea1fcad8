"""Linear layers in the form that the processor multiplies fastest."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

OneRowProduct = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class Projection:
    """x [T, in] → x · weightᵀ + bias [T, out]; weight [out, in], bias [out] or None.

    On a CPU a float32 weight is kept in oneDNN's blocked layout, as torch's own compiler does for frozen weights:
    products of 8 to 512 rows then take 10 to 30 % less time than with plain rows (tests/benchmarks/LOG.md). oneDNN
    makes code for every number of rows it meets, a millisecond and half a megabyte each, so x is filled up to one of
    few numbers. On a GPU one row of 16 bits is multiplied by a kernel of ours.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._bias = bias
        blocked = weight.device.type == "cpu" and weight.dtype == torch.float32 and _has_onednn()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight) if blocked else weight
        self._multiply_blocked = torch.ops.mkldnn._linear_pointwise.default if blocked else None
        self._multiply_one = _one_row_product(weight)

    def __call__(self, x: Tensor) -> Tensor:
        if self._multiply_one is not None and x.shape[0] == 1:
            return self._multiply_one(x, self._weight, self._bias)
        if self._multiply_blocked is None:
            return F.linear(x, self._weight, self._bias)
        rows = x.shape[0]
        missing = padded_rows(rows) - rows
        if missing:
            x = F.pad(x, (0, 0, 0, missing))
        y = self._multiply_blocked(x, self._weight, self._bias, "none", [], "")
        return y[:rows] if missing else y


def padded_rows(rows: int) -> int:
    """The least of 1, 8, 16, … 64, 96, … 256, 384, 512, … that is at least `rows`."""
    if rows <= 1:
        return rows
    step = 8 if rows <= 64 else 32 if rows <= 256 else 128
    return -(-rows // step) * step


def _one_row_product(weight: Tensor) -> OneRowProduct | None:
    if weight.device.type != "cuda" or weight.dtype == torch.float32:
        return None
    from tandem.workers.kernels.triton_gemv import gemv  # triton may be missing elsewhere

    return gemv


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
