"""Decides which adapters a cluster serves."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from threading import Lock, Thread
from types import MappingProxyType
from typing import Any

from tandem.cluster.adapters.values import AdapterOrder, AdapterSet
from tandem.cluster.errors import AdapterRefused, TandemError, UnknownModel

TELL_SECONDS = 5.0  # for each gateway process to hear of a change


class AdapterBook:
    """The set of served adapters. The launcher owns it, or a gateway process without a launcher. Any thread may use it.

    Gateway processes of all hosts order changes here and are told each new set, so they agree. While a name changes, a
    second change of it is refused.
    """

    def __init__(self, most: int, adapters: AdapterSet) -> None:
        """most: the most adapters at a time (adapters.max_adapters). adapters: the adapters of the start."""
        self._most = most
        self._lock = Lock()
        self._set = adapters

    @property
    def current(self) -> AdapterSet:
        return self._set

    def change(self, order: AdapterOrder) -> AdapterSet:
        """Returns the set after the change. Raises AdapterRefused and UnknownModel if the change is not possible."""
        with self._lock:
            known = dict(self._set.by_name)
            before = known.pop(order.name, None)
            if before is None and order.before:
                raise UnknownModel(f"the adapter {order.name!r} is not loaded; another call may have removed it")
            if before is not None and before.digest != order.before:
                raise AdapterRefused(f"the adapter {order.name!r} was changed by another call meanwhile")
            if order.adapter is not None:
                if len(known) >= self._most:
                    raise AdapterRefused(
                        f"{len(known)} adapters are loaded; at most {self._most} may be (adapters.max_adapters): "
                        "remove one first"
                    )
                known[order.name] = order.adapter
            self._set = AdapterSet(self._set.version + 1, MappingProxyType(known))
            return self._set


class AdapterOrders:
    """Carries out the orders of all gateway processes, in the launcher. Any thread may use it."""

    def __init__(self, book: AdapterBook, tell: Callable[[AdapterSet], Sequence["Future[Any]"]]) -> None:
        """tell: begins to tell a set to all gateway processes, and returns the calls under way."""
        self._book = book
        self._tell = tell

    def take(self, order: AdapterOrder) -> "Future[AdapterSet]":
        """Does not block. Done once all processes know of the change, or TELL_SECONDS later: a process that does not
        answer is stopped, and hears of the change when it goes on. A refused process knows what the name stands for
        instead."""
        outcome: Future[AdapterSet] = Future()
        refusal: TandemError | None = None
        try:
            self._book.change(order)
        except TandemError as error:
            refusal = error
        now = self._book.current

        def tell() -> None:
            wait(self._tell(now), TELL_SECONDS)
            if refusal is None:
                outcome.set_result(now)
            else:
                outcome.set_exception(refusal)

        Thread(target=tell, name="adapters", daemon=True).start()
        return outcome
