"""Counters of callers' keys, for a scrape. A key has its series while the keys file has its name."""

from collections.abc import Mapping

from prometheus_client import Metric
from prometheus_client.metrics_core import CounterMetricFamily

from tandem.cache.plan.arrays import Int64Array
from tandem.cluster.keys.key_cells import Sum

COUNTERS = (
    ("tandem:key_requests", "Requests that were admitted, by the name of their key.", Sum.REQUESTS),
    ("tandem:key_prompt_tokens", "Prompt tokens of requests that have ended, by their key.", Sum.PROMPT_TOKENS),
    ("tandem:key_output_tokens", "Output tokens of requests that have ended, by their key.", Sum.OUTPUT_TOKENS),
)
REASONS = {
    "requests": Sum.REFUSED_REQUESTS,
    "tokens": Sum.REFUSED_TOKENS,
    "size": Sum.REFUSED_SIZE,
    "model": Sum.REFUSED_MODEL,
    "priority": Sum.REFUSED_PRIORITY,
    "route": Sum.REFUSED_ROUTE,
}


def key_families(sums: Mapping[str, Int64Array]) -> list[Metric]:
    """sums: of each key, int64 [len(Sum)], by its name. They are this host's."""
    families: list[Metric] = []
    for name, about, one in COUNTERS:
        family = CounterMetricFamily(name, about, labels=["key"])
        for key, counts in sums.items():
            family.add_metric([key], int(counts[one]))
        families.append(family)
    refused = CounterMetricFamily(
        "tandem:key_refused", "Calls that were refused, by their key and why.", labels=["key", "reason"]
    )
    for key, counts in sums.items():
        for reason, one in REASONS.items():
            refused.add_metric([key, reason], int(counts[one]))
    return [*families, refused] if sums else []
