"""How the benchmarks count the time in which a GPU did nothing."""

from tests.benchmarks.timeline import Idle, Span, idle, slowest_kernels


def test_gaps_are_split_into_those_between_steps_and_those_in_graphs() -> None:
    spans = [
        Span(-9, -8, "a, before the first step"),
        Span(-3, 0, "_fetch"),
        Span(0, 2, "Memcpy HtoD (Pinned -> Device)"),
        Span(5, 9, "a"),
        Span(8, 20, "b overlaps a"),
        Span(10, 12, "c within b"),
        Span(21, 23, "d"),
        Span(27, 28, "Memcpy DtoH (Device -> Pinned)"),
        Span(30, 31, "Memcpy HtoD (Pinned -> Device)"),
        Span(31, 40, "a"),
        Span(45, 46, "_fetch"),
        Span(48, 50, "a"),
    ]
    assert idle(spans[::-1]) == Idle(between=3 + 4 + 2 + 5, inside=1 + 2)
    assert idle(spans[3:6]) == Idle(0, 0)


def test_kernels_are_listed_by_their_time_in_a_step() -> None:
    spans = [Span(0, 2, "short"), Span(3, 13, "long"), Span(14, 16, "short"), Span(16, 17, "rare")]
    total, *lines = slowest_kernels(spans, steps=2, most=2)
    assert total.split() == ["7.5", "us", "2.0", "x", "all"]
    assert [line.split() for line in lines] == [["5.0", "us", "0.5", "x", "long"], ["2.0", "us", "1.0", "x", "short"]]
