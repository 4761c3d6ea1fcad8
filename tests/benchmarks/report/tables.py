"""Markdown tables, and cells of numbers, peers and targets."""

from collections.abc import Sequence

from tests.benchmarks.report.rows import Target


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *rows]
    return [f"| {' | '.join(cell.replace('|', '∣') for cell in line)} |" for line in lines]


def number(value: float) -> str:
    """Four digits, or all of them from 10,000 on."""
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def peers_cell(ours: float, peers: Sequence[tuple[str, float]]) -> str:
    """Each peer's number, and the factor ours ÷ theirs."""
    return ", ".join(_peer(ours, *peer) for peer in peers)


def _peer(ours: float, name: str, theirs: float) -> str:
    return f"{name}: {number(theirs)} ({ours / theirs:.2f} ×)" if theirs else f"{name}: {number(theirs)}"


def target_cell(target: Target | None, value: float) -> str:
    """The target, and whether `value` reaches it."""
    return f"{target}: {'reached' if target.reached(value) else '**not reached**'}" if target else ""
