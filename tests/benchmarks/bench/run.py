"""Lists and runs benchmarks for `tandem bench` in this checkout."""

from collections.abc import Sequence
from pathlib import Path

from tandem.cluster.errors import BenchmarkFailed, MissingPlots
from tests.benchmarks.bench.benchmarks import find_benchmarks, print_outcomes, run_benchmark, write_outcome
from tests.benchmarks.bench.plots import draw_plots


def list_benchmarks(names: Sequence[str]) -> None:
    """Prints what there is. Raises UsageError for an unknown name."""
    for benchmark in find_benchmarks(names):
        print(f"{benchmark.name:20} {benchmark.summary}")


def run_benchmarks(names: Sequence[str], out: Path) -> None:
    """Runs those named, or all; writes NAME.json and plots into `out`, and prints what was reached.

    Raises UsageError for an unknown name, and BenchmarkFailed when all have run and one failed.
    """
    outcomes = []
    for benchmark in find_benchmarks(names):
        print(f"{benchmark.name} …", end=" ", flush=True)
        outcomes.append(run_benchmark(benchmark))
        print(f"{outcomes[-1].seconds:g} s", flush=True)
        write_outcome(outcomes[-1], out)
    print_outcomes(outcomes)
    try:
        written = draw_plots(outcomes, out)
        print(f"wrote {len(outcomes)} results and {len(written)} plots to {out}")
    except MissingPlots as error:
        print(f"wrote {len(outcomes)} results to {out}; {error}")
    failed = [outcome.benchmark for outcome in outcomes if "failed" in outcome.result]
    if failed:
        raise BenchmarkFailed(f"failed: {', '.join(failed)}")
