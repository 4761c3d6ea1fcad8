"""Tests the book of adapters, and what every gateway process makes of its changes."""

import pickle
from concurrent.futures import Future
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest

from tandem.cluster.adapters.book import AdapterBook, AdapterOrders
from tandem.cluster.adapters.names import ServedNames, shown
from tandem.cluster.adapters.values import Adapter, AdapterOrder, AdapterSet, check_name
from tandem.cluster.errors import AdapterRefused, Unavailable, UnknownModel
from tests.support.waiting import until

RED = Adapter("red", "/adapters/red", b"r" * 16)
BLUE = Adapter("blue", "/adapters/blue", b"b" * 16)


def order(adapter: Adapter | None, before: bytes = b"", name: str = "red") -> AdapterOrder:
    return AdapterOrder(1, name, adapter, before)


def test_of_two_additions_of_a_name_one_is_refused() -> None:
    book = AdapterBook(4, AdapterSet())
    assert book.change(order(RED)).by_name == {"red": RED}
    with pytest.raises(AdapterRefused, match="changed by another call"):
        book.change(order(replace(RED, digest=b"x" * 16)))
    assert book.current.by_name == {"red": RED}


def test_a_name_that_was_removed_meanwhile_is_not_removed_again() -> None:
    book = AdapterBook(4, AdapterSet(3, MappingProxyType({"red": RED})))
    assert book.change(order(None, RED.digest)).version == 4
    with pytest.raises(UnknownModel, match="'red' is not loaded"):
        book.change(order(None, RED.digest))


def test_other_weights_take_the_place_of_those_that_were_seen() -> None:
    book = AdapterBook(1, AdapterSet(1, MappingProxyType({"red": RED})))
    other = replace(RED, digest=b"x" * 16)
    assert book.change(order(other, RED.digest)).by_name == {"red": other}
    with pytest.raises(AdapterRefused):
        book.change(order(RED, RED.digest))


def test_no_more_names_than_the_configuration_has() -> None:
    book = AdapterBook(1, AdapterSet(1, MappingProxyType({"red": RED})))
    with pytest.raises(AdapterRefused, match=r"at most 1 may be \(adapters.max_adapters\)"):
        book.change(order(BLUE, name="blue"))


def test_an_order_is_done_when_all_processes_know() -> None:
    told: list[tuple[AdapterSet, Future[Any]]] = []

    def tell(adapters: AdapterSet) -> list[Future[Any]]:
        told.append((adapters, Future()))
        return [told[-1][1]]

    orders = AdapterOrders(AdapterBook(4, AdapterSet()), tell)
    outcome = orders.take(order(RED))
    until(lambda: len(told) == 1)
    refused = orders.take(order(BLUE))
    until(lambda: len(told) == 2)
    assert not outcome.done()
    assert not refused.done()
    for _, call in told:
        call.set_result(None)
    assert outcome.result(5) == told[0][0] == told[1][0]
    assert isinstance(refused.exception(5), AdapterRefused)


def test_a_set_travels_between_processes() -> None:
    one = AdapterSet(2, MappingProxyType({"red": RED}))
    assert pickle.loads(pickle.dumps(one)) == one


def test_an_older_set_is_ignored() -> None:
    names = ServedNames(["model", "alias"])
    assert names.update(AdapterSet(2, MappingProxyType({"red": RED})))
    assert not names.update(AdapterSet(1))
    assert names.adapter("red") == RED
    assert names.answer("alias") == "model"
    assert names.answer("red") == "red"


def test_unknown_names_are_told_what_is_served() -> None:
    names = ServedNames(["model"], AdapterSet(1, MappingProxyType({f"a{one}": RED for one in range(20)})))
    with pytest.raises(UnknownModel, match=r"model is 'x'; 'model', 'a0', .* and 13 more are served here"):
        names.adapter("x")


def test_a_list_of_names_is_a_sentence() -> None:
    assert [shown(["a", "b", "c"][:count]) for count in (1, 2, 3)] == [
        "'a' is",
        "'a' and 'b' are",
        "'a', 'b' and 'c' are",
    ]


def test_a_process_that_has_just_started_refuses_no_name_for_good() -> None:
    names = ServedNames(["model"], settled=False)
    with pytest.raises(Unavailable):
        names.adapter("red")
    assert not names.update(AdapterSet())
    with pytest.raises(UnknownModel):
        names.adapter("red")


def test_weights_without_a_name_are_refused() -> None:
    names = ServedNames(["model"], AdapterSet(1, MappingProxyType({"red": RED})))
    names.check(b"")
    names.check(RED.digest)
    with pytest.raises(AdapterRefused, match=BLUE.digest.hex()):
        names.check(BLUE.digest)


@pytest.mark.parametrize("name", ["", " a", "a ", "/a", "a/", "a\nb", "x" * 129])
def test_names_that_no_request_could_give(name: str) -> None:
    with pytest.raises(ValueError, match="must be a name"):
        check_name(name)


@pytest.mark.parametrize("name", ["a", "org/adapter", "été 2", "x" * 128])
def test_other_names(name: str) -> None:
    assert check_name(name) == name
