"""Tolerances against a float64 reference, by dtype. Copies are not here: they match bit for bit."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tolerance:
    rtol: float
    atol: float


ARITHMETIC = {
    torch.float32: Tolerance(rtol=1e-4, atol=1e-5),
    torch.float16: Tolerance(rtol=1e-2, atol=1e-2),
    torch.bfloat16: Tolerance(rtol=5e-2, atol=5e-2),
}


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Compares `actual`, in the dtype under test, with a reference of higher precision."""
    tolerance = ARITHMETIC[actual.dtype]
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance.rtol, atol=tolerance.atol)


BFLOAT16_LOGPROB = 0.25  # natural logarithms of probabilities, after a whole model
