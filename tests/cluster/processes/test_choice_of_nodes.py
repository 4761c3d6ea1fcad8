"""Tests which of a Ray's nodes are chosen when one does not answer, and how far a group can grow on all of them."""

import socket
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from tandem.cluster.errors import NoRoom
from tandem.cluster.processes import ray_nodes
from tandem.cluster.processes.placement import ANYWHERE, Node, Where
from tandem.cluster.processes.ray_nodes import check_growth, choose_nodes, free_places

CPUS = {"CPU": 4.0}
NEED = [{"CPU": 1.0}]


@pytest.fixture(autouse=True)
def _nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes three nodes. The raylet of 127.0.0.2 is gone, and Ray does not know it yet."""
    with socket.create_server(("127.0.0.3", 0)) as there, socket.create_server(("127.0.0.2", 0)) as gone:
        port, lost = there.getsockname()[1], gone.getsockname()[1]
        gone.close()
        nodes = [Node("127.0.0.2", CPUS, CPUS, port=lost), Node("127.0.0.3", CPUS, {"CPU": 2.0}, port=port)]
        monkeypatch.setattr(ray_nodes, "alive_nodes", lambda: nodes)
        monkeypatch.setattr(ray_nodes, "own_node_address", lambda: "127.0.0.1")
        yield


def test_a_node_that_does_not_answer_is_passed_over() -> None:
    assert choose_nodes(NEED, ANYWHERE, Counter(), time.monotonic() + 60) == ["127.0.0.3"]


def test_a_node_that_must_be_chosen_and_does_not_answer_is_not_waited_for() -> None:
    """Islands that are started again wait for their own places meanwhile."""
    with pytest.raises(NoRoom, match=r"no answer from 127\.0\.0\.2"):
        choose_nodes(NEED, Where(address="127.0.0.2"), Counter(), time.monotonic() + 3600)
    assert choose_nodes(NEED, Where(address="127.0.0.3"), Counter(), time.monotonic() + 60) == ["127.0.0.3"]


def test_it_says_how_much_of_a_group_must_be_on_one_node() -> None:
    needed = "6.0 CPUs are needed, 5.0 CPUs of them on one node; "
    with pytest.raises(NoRoom, match=needed):
        choose_nodes([{"CPU": 1.0}, {"CPU": 5.0}], Where(spread=True), Counter(), time.monotonic())


@pytest.mark.parametrize(("where", "found"), [(ANYWHERE, 0), (Where(spread=True), 1)])
def test_islands_that_span_hosts_need_no_host_with_room_for_all(where: Where, found: int) -> None:
    assert free_places(9, [{"CPU": 3.0}, {"CPU": 2.0}], where) == found


@pytest.mark.parametrize("where", [ANYWHERE, Where(spread=True)])
def test_a_group_that_only_shrinks_needs_no_room(where: Where) -> None:
    assert choose_nodes([], where, Counter(), time.monotonic()) == []


@pytest.mark.parametrize(("where", "fit"), [(ANYWHERE, 6), (Where(address="127.0.0.3"), 3)])
def test_a_group_grows_into_what_its_cluster_leaves_and_no_further(where: Where, fit: int) -> None:
    """Places that others have taken may be free soon, and the group waits for them."""
    held = {"127.0.0.2": {"CPU": 0.5}, "127.0.0.3": {"CPU": 1.0}, "127.0.0.9": {"CPU": 3.0}}
    check_growth(2, fit, {"CPU": 1.0}, where, held)
    needed = f"^{fit + 3} processes are needed, with 1.0 CPUs for each; at most {fit + 2} fit: 127.0.0."
    with pytest.raises(NoRoom, match=needed):
        check_growth(2, fit + 1, {"CPU": 1.0}, where, held)
