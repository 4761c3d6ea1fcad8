"""Tests of a soak's summary."""

import random

from tests.benchmarks.soak import QUANTITIES, Series, slope


def test_the_slope_is_that_of_the_line_beneath_some_peaks() -> None:
    chance, minutes = random.Random(1), [number / 4 for number in range(120)]
    values = [400 + 0.5 * minute + (90 if chance.random() < 0.2 else 0) for minute in minutes]
    assert abs(slope(minutes, values) - 0.5) < 0.2
    assert slope([1.0], [7.0]) == 0.0


def test_growth_in_the_first_half_is_no_growth_in_the_second() -> None:
    series = Series([float(minute) for minute in range(60)], [])
    series.looks = [dict.fromkeys(QUANTITIES, 300.0 + min(minute, 25)) for minute in range(60)]
    numbers = series.numbers()["rss_mib"]
    assert numbers == {"start": 300, "half": 325, "end": 325, "low": 325, "high": 325, "per_hour": 0}
    assert len(series.numbers()["by_minute"]) == 12
