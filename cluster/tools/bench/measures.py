"""Numbers of a load, by the names and definitions of vLLM's `bench serve` where it has them.

    ttft   time to first token: from the call to the first message with tokens
    tpot   time per output token: from the first to the last token, by the number of tokens but the first
    itl    inter-token latency: each gap between two messages with tokens, over all requests
    e2el   end-to-end latency: from the call to the last token

A message that brings several tokens is one gap: to hold tokens back makes no gap shorter. Percentiles interpolate
linearly. Times are in milliseconds.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from tandem.cluster.tools.bench.load import Window
from tandem.cluster.tools.bench.mixes import Slo
from tandem.cluster.tools.bench.timeline import Timeline

PERCENTILES = (50, 90, 95, 99)
LATE_MS = 10.0  # at p99: above it requests come in other bursts than asked for
BUSY = 0.8  # of a core
MOST_ERRORS = 5  # kinds that are told

Numbers = dict[str, Any]


def numbers_of(timelines: Sequence[Timeline], slo: Slo, overdue: int = 0) -> Numbers:
    """Returns the numbers of one load's measured requests; failed ones count in `failed` and miss the SLO.

    overdue: the number of further misses, for a load that was stopped.
    """
    done = [each for each in timelines if each.error is None]
    begin = min((each.sent for each in timelines), default=0.0)
    duration = max((each.sent + each.e2el for each in done), default=begin) - begin
    good = sum(each.meets(slo) for each in timelines)
    good_by_mean = sum(each.meets(slo, mean_gap=True) for each in timelines)
    inputs, outputs = sum(each.prompt_tokens for each in done), sum(each.output_tokens for each in done)
    late = np.array([each.late for each in timelines] or [0.0]) * 1e3
    numbers: Numbers = {
        "completed": len(done),
        "failed": len(timelines) - len(done),
        "duration": duration,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": _per(len(done), duration),
        "request_goodput": _per(good, duration),
        "output_throughput": _per(outputs, duration),
        "total_token_throughput": _per(inputs + outputs, duration),
        "slo_attainment": _per(good, len(timelines) + overdue),
        "slo_attainment_mean_gap": _per(good_by_mean, len(timelines) + overdue),
        "total_cached_tokens": sum(each.cached_tokens for each in done),
        "total_reusable_tokens": sum(each.reusable_tokens for each in done),
        "tokens_per_message": _per(outputs, sum(len(each.seconds) for each in done)),
        "total_drafted_tokens": sum(each.drafted_tokens for each in done),
        "total_accepted_tokens": sum(each.accepted_tokens for each in done),
        "p99_late_ms": float(np.percentile(late, 99)),
        "max_late_ms": float(late.max()),
    }
    numbers |= _latency("ttft", [each.ttft for each in done])
    numbers |= _latency("tpot", [each.tpot for each in done if each.tpot is not None])
    numbers |= _latency("itl", np.concatenate([each.gaps for each in done]) if done else [])
    numbers |= _latency("e2el", [each.e2el for each in done])
    errors = Counter(each.error for each in timelines if each.error is not None)
    return numbers | {"errors": dict(errors.most_common(MOST_ERRORS))}


def steady_numbers(window: Window) -> Numbers:
    """Returns the rates while measured requests arrived; vLLM's count the time until the last of them has ended,
    too."""
    return {
        "steady_request_throughput": _per(window.requests, window.seconds),
        "steady_output_throughput": _per(window.tokens, window.seconds),
    }


def _latency(name: str, seconds: "Sequence[float] | np.ndarray") -> Numbers:
    """Returns a latency's numbers, 0 without values, as in vLLM."""
    values = np.asarray(seconds if len(seconds) else [0.0]) * 1e3
    numbers = {f"mean_{name}_ms": values.mean(), f"median_{name}_ms": np.median(values), f"std_{name}_ms": values.std()}
    numbers |= {f"p{percent}_{name}_ms": np.percentile(values, percent) for percent in PERCENTILES}
    return {key: float(value) for key, value in numbers.items()}


def _per(count: float, whole: float) -> float:
    return count / whole if whole else 0.0


def warnings_of(numbers: Numbers) -> list[str]:
    """Returns the reasons to doubt a load's numbers."""
    warnings = []
    if numbers["p99_late_ms"] > LATE_MS:
        late = f"{numbers['p99_late_ms']:.1f} ms at p99"
        warnings.append(f"the load generator was late: {late}; its machine is busy, or needs more --processes")
    if numbers["generator_busy"] > BUSY:
        warnings.append(f"a generator process used {numbers['generator_busy']:.2f} cores; give more --processes")
    foreign = numbers["total_cached_tokens"] - numbers["total_reusable_tokens"]
    if foreign > 0.01 * numbers["total_input_tokens"]:
        warnings.append(f"{foreign} prompt tokens were cached before the load: give another --seed or --salt")
    if numbers["failed"]:
        failures = "; ".join(f"{count} × {error}" for error, count in numbers["errors"].items())
        warnings.append(f"{numbers['failed']} requests failed: {failures}")
    return warnings
