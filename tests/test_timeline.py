"""How the benchmarks count the time in which a GPU did nothing."""

from tests.benchmarks.timeline import Idle, Span, idle


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
