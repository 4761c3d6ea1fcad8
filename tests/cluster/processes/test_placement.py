"""Tests which node a group goes to."""

from collections import Counter

import pytest

from tandem.cluster.processes.placement import (
    ANYWHERE,
    Node,
    Where,
    could_have_room,
    in_words,
    nodes_with_room,
    places,
    spread_over,
    spread_places,
)

NODES = [
    Node("a", {"CPU": 8, "GPU": 2, "ssd": 1}, {"CPU": 8, "GPU": 0}, {"zone": "north"}),
    Node("b", {"CPU": 8, "GPU": 4}, {"CPU": 2, "GPU": 2}, {"zone": "south"}),
    Node("c", {"CPU": 4, "GPU": 4}, {"CPU": 4, "GPU": 4}),
]


def addresses(nodes: list[Node]) -> str:
    return "".join(node.address for node in nodes)


def test_the_node_of_the_fewest_groups_comes_first_and_then_the_freest() -> None:
    assert addresses(nodes_with_room(NODES, {"CPU": 1.0}, Counter())) == "cba"
    assert addresses(nodes_with_room(NODES, {"CPU": 1.0}, Counter(c=1))) == "bac"
    assert addresses(nodes_with_room(NODES, {"CPU": 1.0, "GPU": 1}, Counter(c=3))) == "bc"
    assert addresses(nodes_with_room(NODES, {"CPU": 0.3, "GPU": 3}, Counter(c=3))) == "c"
    assert nodes_with_room(NODES, {"CPU": 1.0, "GPU": 5}, Counter()) == []


@pytest.mark.parametrize(
    ("bundles", "groups", "expected"),
    [
        ([{"CPU": 1.0}] * 2, {}, "cb"),
        ([{"CPU": 1.0}] * 5, {}, "cbacb"),
        ([{"CPU": 1.0}] * 2, {"c": 1}, "ba"),
        ([{"CPU": 1.0, "GPU": 1}] * 5, {}, "cbcbc"),
        ([{"CPU": 2.0}] * 7, {}, "cbacaaa"),
        ([{"CPU": 2.0}] * 8, {}, ""),
        ([{"CPU": 0.1, "GPU": 1}, {"CPU": 0.4, "GPU": 4}], {}, "bc"),
        ([{"CPU": 0.3, "GPU": 3}, {"CPU": 0.3, "GPU": 3}], {}, ""),
    ],
)
def test_members_of_a_group_are_spread_as_far_as_there_is_room(
    bundles: list[dict[str, float]], groups: dict[str, int], expected: str
) -> None:
    assert addresses(spread_over(NODES, bundles, Counter(groups))) == expected


def test_an_address_names_one_node() -> None:
    where = Where(address="b")
    assert [where.fits(node, "a") for node in NODES] == [False, True, False]
    assert str(where) == "the address b"


def test_rounding_of_fractions_costs_no_room() -> None:
    node = Node("a", {"CPU": 0.3}, {"CPU": 0.29999999}, {})
    assert nodes_with_room([node], {"CPU": 0.3}, Counter()) == [node]


@pytest.mark.parametrize(
    ("need", "found"), [({"CPU": 0.2, "GPU": 2}, 3), ({"CPU": 1.5, "GPU": 0}, 8), ({"CPU": 0.1, "GPU": 5}, 0)]
)
def test_places_are_counted_node_by_node(need: dict[str, float], found: int) -> None:
    assert places(NODES, need) == found


@pytest.mark.parametrize(("bundles", "most", "found"), [((1, 1), 9, 3), ((2, 4), 9, 1), ((3, 3), 9, 0), ((1,), 2, 2)])
def test_places_of_groups_over_hosts_are_counted_worker_by_worker(
    bundles: tuple[int, ...], most: int, found: int
) -> None:
    """No host has room for all of a group; each worker is on one."""
    assert spread_places(NODES, [{"CPU": 0.1, "GPU": gpus} for gpus in bundles], most) == found


def test_room_of_two_nodes_is_not_one_nodes() -> None:
    assert could_have_room(NODES, {"CPU": 8.0, "GPU": 2})
    assert not could_have_room(NODES, {"CPU": 8.0, "GPU": 5})


@pytest.mark.parametrize(
    ("where", "fitting", "words"),
    [
        (ANYWHERE, "abc", ""),
        (Where(here=True), "b", "this host"),
        (Where(resources={"ssd": 1}), "a", "1 ssd"),
        (Where(resources={"ssd": 2}), "", "2 ssd"),
        (Where(labels={"zone": "south"}), "b", "the label zone=south"),
        (Where(True, {"ssd": 1}, {"zone": "x"}), "", "this host and 1 ssd and the label zone=x"),
    ],
)
def test_where(where: Where, fitting: str, words: str) -> None:
    assert addresses([node for node in NODES if where.fits(node, "b")]) == fitting
    assert str(where) == words


def test_each_nodes_room_is_said() -> None:
    assert in_words(NODES[:2]) == ("a has 8 of 8 CPUs and 0 of 2 GPUs free; b has 2 of 8 CPUs and 2 of 4 GPUs free")
