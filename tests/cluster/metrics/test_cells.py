"""Counts in shared memory: what a scrape shows of them is what prometheus_client itself would count."""

import mmap

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.cluster.metrics.cells import CellLayout, Counter, Histogram, Recorder
from tandem.cluster.metrics.series import LAYOUT
from tandem.cluster.peers.table import LASTING_CELLS, Column, GatewayTable, table_bytes

BOUNDS = (0.001, 0.01, 0.1, 1.0)
SECONDS = Histogram("x:seconds", "About.", BOUNDS)
COUNT = Counter("x:count", "About.", labels=("kind", "code"), series=(("a", "1"), ("b", "2")))
TIME = Counter("x:time", "About.", unit=1e-6)
SMALL = CellLayout((COUNT, SECONDS, TIME))
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def views(processes: int = 3) -> list[GatewayTable]:
    memory = mmap.mmap(-1, table_bytes(processes, 1))
    return [GatewayTable(memory, processes, 1, process) for process in range(processes)]


def samples(layout: CellLayout, tables: list[GatewayTable]) -> Samples:
    families = layout.families({"model_name": "m"}, [tables[0].lasting(process) for process in range(len(tables))])
    return {(one.name, tuple(sorted(one.labels.items()))): one.value for family in families for one in family.samples}


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0, 5) | st.sampled_from(BOUNDS), st.booleans())))
def test_a_histogram_of_all_processes_is_that_of_all_values(values: list[tuple[int, float, bool]]) -> None:
    tables = views()
    recorders = [Recorder(SMALL, table.lasting(process)) for process, table in enumerate(tables)]
    registry = prometheus_client.CollectorRegistry()
    theirs = prometheus_client.Histogram("x:seconds", "About.", ["model_name"], buckets=BOUNDS, registry=registry)
    for process, value, several in values:
        theirs.labels("m").observe(value)
        if several:
            recorders[process].observe_all(SECONDS, [value])
        else:
            recorders[process].observe(SECONDS, value)
    found = samples(SMALL, tables)
    for family in registry.collect():
        for one in family.samples:
            if not one.name.endswith("_created"):
                key = (one.name, tuple(sorted(one.labels.items())))
                assert found[key] == pytest.approx(one.value, abs=1e-6 * (1 + len(values)))


def test_many_values_at_once_count_like_each() -> None:
    one, other = views(2)
    values = [0.0005, 0.001, 0.0011, 0.5, 7.0, 0.1]
    Recorder(SMALL, one.lasting(0)).observe_all(SECONDS, values)
    for value in values:
        Recorder(SMALL, other.lasting(1)).observe(SECONDS, value)
    assert list(one.lasting(0)) == list(one.lasting(1))


def test_counters_add_up_by_their_labels() -> None:
    tables = views()
    for process, table in enumerate(tables):
        recorder = Recorder(SMALL, table.lasting(process))
        recorder.add(COUNT, 2, "b", "2")
        recorder.add(TIME, 0.25)
    found = samples(SMALL, tables)
    assert found["x:count_total", (("code", "2"), ("kind", "b"), ("model_name", "m"))] == 6
    assert found["x:count_total", (("code", "1"), ("kind", "a"), ("model_name", "m"))] == 0
    assert found["x:time_total", (("model_name", "m"),)] == 0.75


def test_a_process_that_follows_a_lost_one_counts_on() -> None:
    tables = views()
    Recorder(SMALL, tables[1].lasting(1)).add(TIME, 2.0)
    tables[1].put(Column.ACTIVE, 7)
    before = samples(SMALL, tables)
    tables[0].clear(1, restarts=1)
    assert tables[0].total(Column.ACTIVE) == 0
    assert samples(SMALL, tables) == before
    Recorder(SMALL, tables[1].lasting(1)).add(TIME, 0.5)
    assert samples(SMALL, tables)["x:time_total", (("model_name", "m"),)] == 2.5


def test_lasting_counts_meet_nothing_else() -> None:
    table = views()[0]
    table.lasting(0)[:] = memoryview(bytes([255]) * 8 * LASTING_CELLS).cast("q")
    assert [table.total(column) for column in Column] == [0] * len(Column)
    assert sum(table.own(table.id_column(f"id {number}")) for number in range(1000)) == 0
    assert not any(table.lasting(1))


def test_more_metrics_than_cells_are_refused() -> None:
    with pytest.raises(ValueError, match=f"cells; a process has {LASTING_CELLS}"):
        CellLayout([Histogram(f"x:{number}", "About.", BOUNDS) for number in range(LASTING_CELLS)])


def test_no_two_metrics_share_cells_or_names() -> None:
    ends = [LAYOUT.first(metric) + metric.num_cells for metric in LAYOUT.metrics]
    assert [LAYOUT.first(metric) for metric in LAYOUT.metrics[1:]] == ends[:-1]
    assert len({metric.name for metric in LAYOUT.metrics}) == len(LAYOUT.metrics)
