"""Lets callers in."""

from collections.abc import Callable, Sequence

from tandem.cluster.keys.access import OPERATOR, Access
from tandem.cluster.keys.book import KeyBook


class Gate:
    """Lets callers in: operators by the token, others by their keys."""

    def __init__(self, admits: Callable[[Sequence[object]], bool] | None, book: KeyBook | None) -> None:
        """admits: whether a call shows the operator's token; None: no token is asked for. book: None: there are no
        keys."""
        self._admits = admits
        self._book = book

    @property
    def is_open(self) -> bool:
        """Returns whether the gate admits everybody."""
        return self._admits is None

    def access(self, credentials: Sequence[object]) -> Access | None:
        """Returns the caller's rights, None if it has none. credentials: the values of the header `authorization`.
        Raises as KeyBook.find()."""
        if self._admits is None or self._admits(credentials):
            return OPERATOR
        return None if self._book is None else self._book.find(credentials)
