"""Tests what the gateway's processes see of each other."""

import mmap
import multiprocessing
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.cluster.errors import StartFailed
from tandem.cluster.peers.placed_tokens import PlacedTokens
from tandem.cluster.peers.table import SINGLE, Column, GatewayFile, GatewayTable, open_table, table_bytes

PROCESSES, ISLANDS = 3, 2


def views() -> list[GatewayTable]:
    memory = mmap.mmap(-1, table_bytes(PROCESSES, ISLANDS))
    return [GatewayTable(memory, PROCESSES, ISLANDS, process, "key") for process in range(PROCESSES)]


@given(st.lists(st.tuples(st.integers(0, PROCESSES - 1), st.integers(-50, 50))))
def test_a_total_is_what_all_have_added(steps: list[tuple[int, int]]) -> None:
    tables = views()
    for process, amount in steps:
        tables[process].add(Column.QUEUED, amount)
    for process, table in enumerate(tables):
        assert table.total(Column.QUEUED) == sum(amount for _, amount in steps)
        assert table.own(Column.QUEUED) == sum(amount for one, amount in steps if one == process)
        assert table.own(Column.CALLS) == 0


def test_columns_of_workers_clients_and_ids_do_not_meet() -> None:
    table = views()[0]
    workers = {column for island in range(ISLANDS) for pe in range(512) for column in table.placed_columns(island, pe)}
    assert len(workers) == 2 * ISLANDS * 512
    clients = {table.client_column(f"client {number}") for number in range(3000)}
    ids = {table.id_column(f"id {number}") for number in range(3000)}
    single = set(range(SINGLE))
    assert len(workers | clients | ids | single) == len(workers) + len(clients) + len(ids) + len(single)
    assert max(ids) * 8 < table_bytes(1, ISLANDS)
    assert len(ids) > 2000


def test_nobody_without_the_key_knows_who_shares_a_cell() -> None:
    memory = mmap.mmap(-1, table_bytes(1, 1))
    one, other = (GatewayTable(memory, 1, 1, 0, key) for key in ("key", "another"))
    ids = [f"id {number}" for number in range(100)]
    assert [one.id_column(each) for each in ids] != [other.id_column(each) for each in ids]


def test_a_worker_s_load_is_what_all_processes_have_placed_in_all_epochs() -> None:
    tables = views()
    one, other = PlacedTokens(tables[0], 1, 7), PlacedTokens(tables[1], 1, 7)
    beside = PlacedTokens(tables[1], 0, 7)
    one.tokens.add(30)
    other.tokens.add(12)
    assert (one.tokens.own, one.tokens.of_all, other.tokens.of_all, beside.tokens.of_all) == (30, 42, 42, 0)
    one.prompts.add(9)
    other.prompts.add(4)
    assert (one.prompts.of_all, beside.prompts.of_all, one.tokens.of_all) == (13, 0, 42)
    next_epoch = PlacedTokens(tables[0], 1, 7)
    next_epoch.tokens.add(5)
    assert other.tokens.of_all == 47
    one.tokens.add(-30)
    assert (next_epoch.tokens.own, other.tokens.of_all) == (5, 17)


def test_a_cleared_row_counts_nothing_but_its_restarts() -> None:
    tables = views()
    for table in tables:
        for column in (Column.SOCKET, Column.CALLS, table.id_column("x"), table.client_column("c")):
            table.put(column, 3)
    assert tables[0].others() == [1, 2]
    tables[0].clear(1, restarts=4)
    assert tables[0].others() == [2]
    assert tables[0].total(tables[0].id_column("x")) == 6
    assert (tables[2].total(Column.CALLS), tables[2].total(Column.RESTARTS)) == (6, 4)


def test_another_process_maps_the_same_table() -> None:
    file = GatewayFile(2, 1)
    process = multiprocessing.get_context("fork").Process(target=_add, args=(file.path,))
    process.start()
    process.join(30)
    assert process.exitcode == 0
    assert file.table.total(Column.CALLS) == 5
    with pytest.raises(StartFailed, match=r"has \d+ bytes"):
        open_table(file.path, 3, 1, 0, "key")
    file.close()
    file.close()
    with pytest.raises(StartFailed, match=r"cannot be opened|is not the table"):
        open_table(file.path, 2, 1, 0, "key")


def _add(path: str) -> None:
    open_table(path, 2, 1, 1, "key").add(Column.CALLS, 5)
    os._exit(0)
