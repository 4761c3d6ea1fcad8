"""The one place that says which adapters a cluster serves."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from threading import Lock, Thread
from types import MappingProxyType
from typing import Any

from tandem.cluster.adapters.values import AdapterOrder, AdapterSet
from tandem.cluster.errors import AdapterRefused, TandemError, UnknownModel

TELL_SECONDS = 5.0  # for each gateway process to hear of a change


class AdapterBook:
    """Owned by the cluster's launcher, or by a gateway process without one. From any thread.

    Gateway processes of all hosts order changes here and are told each new set, so they agree. Of two changes of a name
    at a time the second is refused.
    """

    def __init__(self, most: int, adapters: AdapterSet) -> None:
        """most: adapters at a time (adapters.max_adapters). adapters: those of the start."""
        self._most = most
        self._lock = Lock()
        self._set = adapters

    @property
    def current(self) -> AdapterSet:
        return self._set

    def change(self, order: AdapterOrder) -> AdapterSet:
        """The set behind the change. Raises AdapterRefused and UnknownModel where it cannot be."""
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
    """Takes the orders of all gateway processes, in the launcher. From any thread."""

    def __init__(self, book: AdapterBook, tell: Callable[[AdapterSet], Sequence["Future[Any]"]]) -> None:
        """tell: begins to tell a set to all gateway processes; the calls under way."""
        self._book = book
        self._tell = tell

    def take(self, order: AdapterOrder) -> "Future[AdapterSet]":
        """Does not block. Done once all processes know of the change, or TELL_SECONDS later: one that does not answer
        is stopped, and hears of it when it goes on. Who is refused knows what the name stands for instead."""
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
