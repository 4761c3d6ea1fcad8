"""Counters and histograms in the lasting cells of the gateway's table.

Each process writes cells of its own, and a scrape of any process sums the cells of all. The cells outlast a lost
process, so no sum goes down.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from prometheus_client import Metric
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily

from tandem.cluster.peers.table import LASTING_CELLS

Cells = memoryview  # of int64


@dataclass(frozen=True, eq=False)
class Counter:
    """A counter. series: all values of the labels, so that each is there from the first scrape on. unit: what 1 in a
    cell stands for."""

    name: str
    about: str
    labels: tuple[str, ...] = ()
    series: tuple[tuple[str, ...], ...] = ((),)
    unit: float = 1.0

    @property
    def num_cells(self) -> int:
        return len(self.series)

    def family(self, common: dict[str, str], sums: Sequence[int]) -> Metric:
        """Returns the metric's family. common: labels of all metrics. sums: of its cells over all processes."""
        family = CounterMetricFamily(self.name, self.about, labels=[*common, *self.labels])
        for values, total in zip(self.series, sums, strict=True):
            family.add_metric([*common.values(), *values], total * self.unit)
        return family


@dataclass(frozen=True, eq=False)
class Histogram:
    """A histogram. bounds: of its buckets, ascending, without infinity. unit: of the sum's cell, small enough that an
    observation loses nothing. also: a second name, for older dashboards."""

    name: str
    about: str
    bounds: tuple[float, ...]
    unit: float = 1e-6
    also: str = ""

    @property
    def num_cells(self) -> int:
        return len(self.bounds) + 2  # one bucket after the last bound, and the sum

    def families(self, common: dict[str, str], sums: Sequence[int]) -> list[Metric]:
        """Returns one family for each of its names, as Counter.family does."""
        *counts, total = sums
        bounds = [*map(str, self.bounds), "+Inf"]
        families: list[Metric] = []
        for name in filter(None, (self.name, self.also)):
            family = HistogramMetricFamily(name, self.about, labels=[*common])
            buckets = list(zip(bounds, accumulate(counts), strict=True))
            family.add_metric([*common.values()], buckets, total * self.unit)
            families.append(family)
        return families


class CellLayout:
    """Assigns cells to metrics in the order given, so that all processes agree."""

    def __init__(self, metrics: Sequence[Counter | Histogram]) -> None:
        """ValueError when they need more cells than there are."""
        ends = list(accumulate(metric.num_cells for metric in metrics))
        if ends[-1] > LASTING_CELLS:
            raise ValueError(f"metrics need {ends[-1]} cells; a process has {LASTING_CELLS}")
        self.metrics = tuple(metrics)
        self._first = {metric: end - metric.num_cells for metric, end in zip(metrics, ends, strict=True)}

    def first(self, metric: Counter | Histogram) -> int:
        return self._first[metric]

    def families(self, common: dict[str, str], processes: Sequence[Cells]) -> list[Metric]:
        """Returns all metrics, summed over the cells of all processes."""
        sums = np.sum([np.frombuffer(cells, np.int64) for cells in processes], axis=0).tolist()
        families: list[Metric] = []
        for metric in self.metrics:
            first = self._first[metric]
            own = sums[first : first + metric.num_cells]
            if isinstance(metric, Counter):
                families.append(metric.family(common, own))
            else:
                families += metric.families(common, own)
        return families


class Recorder:
    """Counts in one process's cells. Owned by its event loop."""

    def __init__(self, layout: CellLayout, cells: Cells) -> None:
        self._layout = layout
        self._cells = cells

    def add(self, counter: Counter, amount: float = 1, *labels: str) -> None:
        """amount: in the metric's own unit, at least 0. labels: values, in the counter's order."""
        index = counter.series.index(labels)
        self._cells[self._layout.first(counter) + index] += round(amount / counter.unit)

    def observe(self, histogram: Histogram, value: float) -> None:
        first = self._layout.first(histogram)
        self._cells[first + bisect_left(histogram.bounds, value)] += 1
        self._cells[first + len(histogram.bounds) + 1] += round(value / histogram.unit)

    def observe_all(self, histogram: Histogram, values: Sequence[float]) -> None:
        """Observes many values at once, at a tenth of a microsecond each."""
        array, first = np.array(values), self._layout.first(histogram)
        buckets = np.bincount(np.searchsorted(histogram.bounds, array), minlength=len(histogram.bounds) + 1)
        for index, count in enumerate(buckets.tolist()):
            self._cells[first + index] += count
        self._cells[first + len(histogram.bounds) + 1] += round(float(array.sum()) / histogram.unit)
