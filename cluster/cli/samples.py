"""A scrape as numbers, and what two scrapes say of the time between them."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from tandem.cluster.metrics.quantile import quantile


class Samples:
    """All samples of one scrape."""

    def __init__(self, text: str) -> None:
        self._samples: defaultdict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._samples[sample.name].append((sample.labels, sample.value))

    @property
    def at(self) -> float:
        """The time of the sample, in seconds since the gateway started."""
        return self.total("tandem:uptime_seconds")

    @property
    def names(self) -> set[str]:
        return set(self._samples)

    def total(self, name: str, **labels: str) -> float:
        """Returns the sum of a metric's series that have these labels; 0 if there is none."""
        return sum(value for _, value in self.series(name, **labels))

    def series(self, name: str, **labels: str) -> list[tuple[dict[str, str], float]]:
        """Returns the series that have these labels, each with all its labels and its value."""
        return [(own, value) for own, value in self._samples.get(name, []) if labels.items() <= own.items()]

    def buckets(self, name: str) -> dict[float, float]:
        """Returns a histogram's counts up to each bound, summed over its series."""
        counts: defaultdict[float, float] = defaultdict(float)
        for labels, value in self._samples.get(f"{name}_bucket", []):
            counts[float(labels["le"])] += value
        return dict(counts)


class Interval(NamedTuple):
    """Two scrapes, the later one last."""

    before: Samples
    after: Samples

    @property
    def seconds(self) -> float:
        return self.after.at - self.before.at

    def rate(self, name: str, **labels: str) -> float:
        """Returns how much a counter grew a second. A counter that restarted grew from 0."""
        after, before = self.after.total(name, **labels), self.before.total(name, **labels)
        return (after - before if after >= before else after) / self.seconds if self.seconds > 0 else 0.0

    def quantiles(self, name: str, fractions: Sequence[float]) -> list[float]:
        """Returns quantiles of a histogram's values between the samples, else of all values; empty before the first."""
        after, before = self.after.buckets(name), self.before.buckets(name)
        counts = {bound: after[bound] - before.get(bound, 0.0) for bound in sorted(after)}
        if not any(counts.values()):
            counts = dict(sorted(after.items()))
        if not any(counts.values()):
            return []
        return [quantile(counts, fraction) for fraction in fractions]
