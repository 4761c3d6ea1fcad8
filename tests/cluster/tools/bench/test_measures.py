"""Definitions of what is measured, on timelines made by hand."""

from array import array

import numpy as np
import pytest

from tandem.cluster.tools.bench.load import Window
from tandem.cluster.tools.bench.measures import numbers_of, steady_numbers, warnings_of
from tandem.cluster.tools.bench.mixes import Slo
from tandem.cluster.tools.bench.timeline import Running, Timeline

SLO = Slo(ttft_ms=500, gap_ms=15)


def timeline(
    sent: float, *seconds: float, tokens: int | None = None, error: str | None = None, **more: int
) -> Timeline:
    """seconds: of each message, since it was sent."""
    running = Running(0, due=sent - 0.002, error=error, **more)  # pyright: ignore[reportArgumentType]
    running.sent, running.arrivals = sent, array("d", (sent + each for each in seconds))
    running.output_tokens, running.prompt_tokens = tokens or len(seconds), 10
    return Timeline.of(running)


def test_each_number_by_its_definition() -> None:
    ones = [
        timeline(100.0, 0.1, 0.11, 0.13, cached_tokens=4, reusable_tokens=8),
        timeline(100.5, 0.2, 0.24, tokens=5),
        timeline(101.0, 0.3),
        timeline(101.5, error="refused"),
    ]
    numbers = numbers_of(ones, SLO)
    ttft, e2el = np.array([100, 200, 300]), np.array([130, 240, 300])
    tpot, itl = np.array([15, 10]), np.array([10, 20, 40])
    for name, values in (("ttft", ttft), ("e2el", e2el), ("tpot", tpot), ("itl", itl)):
        assert numbers[f"mean_{name}_ms"] == pytest.approx(values.mean(), rel=1e-4)
        assert numbers[f"median_{name}_ms"] == pytest.approx(np.median(values), rel=1e-4)
        assert numbers[f"std_{name}_ms"] == pytest.approx(values.std(), rel=1e-4)
        for percent in (90, 99):
            assert numbers[f"p{percent}_{name}_ms"] == pytest.approx(np.percentile(values, percent), rel=1e-4)
    assert (numbers["completed"], numbers["failed"], numbers["errors"]) == (3, 1, {"refused": 1})
    assert (numbers["total_input_tokens"], numbers["total_output_tokens"]) == (30, 9)
    assert numbers["duration"] == pytest.approx(1.3)
    assert numbers["request_throughput"] == pytest.approx(3 / 1.3)
    assert numbers["output_throughput"] == pytest.approx(9 / 1.3)
    assert numbers["total_token_throughput"] == pytest.approx(39 / 1.3)
    assert (numbers["total_cached_tokens"], numbers["total_reusable_tokens"]) == (4, 8)
    assert numbers["tokens_per_message"] == pytest.approx(9 / 6)
    assert numbers["p99_late_ms"] == pytest.approx(2.0)
    assert numbers["slo_attainment"] == 1 / 4  # gaps of 10 and 20 have their p90 at 19
    assert numbers["request_goodput"] == pytest.approx(1 / 1.3)


def test_both_sides_of_the_slo_must_be_kept() -> None:
    tenth_late = [0.1 + 0.01 * step for step in range(11)]
    assert timeline(1.0, *tenth_late).meets(SLO)
    assert not timeline(1.0, *(each + 0.45 for each in tenth_late)).meets(SLO)
    assert timeline(1.0, 0.1, *(each + 0.5 for each in tenth_late)).meets(SLO)  # one gap in 11 is beyond
    assert not timeline(1.0, 0.1, 0.5, *(each + 0.9 for each in tenth_late)).meets(SLO)  # two gaps in 12 are
    assert not timeline(1.0, *tenth_late, error="broken").meets(SLO)


def test_by_the_mean_gap_rare_and_frequent_long_gaps_count_alike() -> None:
    often = timeline(1.0, *np.cumsum([0.1, *[0.005] * 8, 0.03, 0.03]))  # mean 10 ms, p90 30 ms
    once = timeline(1.0, *np.cumsum([0.1, *[0.005] * 11, 0.3]))  # mean 30 ms, p90 5 ms
    assert (often.meets(SLO), often.meets(SLO, mean_gap=True)) == (False, True)
    assert (once.meets(SLO), once.meets(SLO, mean_gap=True)) == (True, False)
    assert not timeline(1.0, 0.6, 0.601).meets(SLO, mean_gap=True)  # the first token is late
    numbers = numbers_of([often, once, once], SLO)
    assert (numbers["slo_attainment"], numbers["slo_attainment_mean_gap"]) == (2 / 3, 1 / 3)


def test_tokens_that_come_together_make_no_gap_shorter() -> None:
    together = timeline(1.0, *(0.1 + 0.03 * step for step in range(5)), tokens=20)
    assert not together.meets(SLO)
    assert numbers_of([together], SLO)["median_itl_ms"] == pytest.approx(30, rel=1e-4)


def test_requests_that_were_too_late_when_a_load_was_stopped_miss_the_slo() -> None:
    numbers = numbers_of([timeline(1.0, 0.1)], SLO, overdue=3)
    assert (numbers["slo_attainment"], numbers["failed"]) == (0.25, 0)


def test_tokens_of_a_window_are_shared_out_by_messages() -> None:
    running = Running(8, 0.0, arrivals=array("d", [1.0, 2.0, 3.0, 4.0]), output_tokens=8)
    assert [running.tokens_within(*window) for window in ((1.0, 3.0), (1.5, 9.0), (5.0, 9.0))] == [4.0, 6.0, 0.0]
    assert Running(8, 0.0, arrivals=array("d", [1.0, 2.0])).tokens_within(0.0, 9.0) == 2.0  # cancelled, without usage
    assert steady_numbers(Window(6, 90.0, 3.0)) == {"steady_request_throughput": 2, "steady_output_throughput": 30}


def test_without_any_answer_there_are_numbers() -> None:
    numbers = numbers_of([timeline(1.0, error="refused")], SLO)
    assert (numbers["completed"], numbers["request_throughput"], numbers["mean_ttft_ms"]) == (0, 0, 0)


def test_doubts_are_told() -> None:
    numbers = numbers_of([timeline(1.0, 0.1, cached_tokens=10), timeline(1.0, error="refused")], SLO)
    told = warnings_of({**numbers, "generator_busy": 0.95, "p99_late_ms": 30.0})
    assert [next(word for word in ("late", "cores", "--salt", "refused") if word in line) for line in told] == [
        "late",
        "cores",
        "--salt",
        "refused",
    ]
    assert warnings_of({**numbers_of([timeline(1.0, 0.1)], SLO), "generator_busy": 0.1}) == []
