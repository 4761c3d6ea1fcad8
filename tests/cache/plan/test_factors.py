"""Checks the factors with which kernels multiply, and by which they divide, in float32."""

from typing import Any

import numpy as np
import pytest

from tandem.cache.plan.arrays import LEAST_FACTOR, MOST_FACTOR, check_factor
from tandem.cache.plan.errors import InvalidArgument

NO_FACTORS = [0.0, -1.0, float("nan"), float("inf"), 1e-39, 1e39]


@pytest.mark.parametrize("value", [LEAST_FACTOR, MOST_FACTOR])
def test_the_least_and_the_most_are_normal_in_float32_and_so_are_their_reciprocals(value: float) -> None:
    for one in (value, 1 / value):
        assert np.finfo(np.float32).tiny <= np.float32(one) < np.inf
    check_factor("factor", value)
    for factor in (1, np.float32(2)):
        check_factor("factor", factor)


@pytest.mark.parametrize(
    "value", [*NO_FACTORS, LEAST_FACTOR * 0.999, MOST_FACTOR * 1.001, "1", None, True, 1j, [1.0]], ids=repr
)
def test_others_are_refused_by_name(value: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"^factor is .*; it must be a number from 1\.2e-38 to 8\.5e\+37"):
        check_factor("factor", value)
