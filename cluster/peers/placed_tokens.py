"""The load of a worker: the tokens placed on it by this gateway process, and by all gateway processes of all hosts."""

from collections.abc import Iterable

from tandem.cluster.peers.table import GatewayTable


class SharedCount:
    """A count of this process, and the sum of all processes' counts."""

    def __init__(self, table: GatewayTable, column: int) -> None:
        self.own = 0
        self._table = table
        self._column = column
        self._cells, self._others = table.placed_elsewhere(column)

    def add(self, amount: int) -> None:
        self.own += amount
        self._table.add(self._column, amount)

    @property
    def of_all(self) -> int:
        total, cells = self.own, self._cells
        for other in self._others:
            total += cells[other]
        return total


class PlacedTokens:
    """The tokens placed on one worker in one epoch.

    The table counts a worker's epochs together. Tokens of an old one are taken back as its requests end.
    """

    def __init__(self, table: GatewayTable, island: int, pe: int) -> None:
        """island: its number in Membership."""
        self.columns = tokens, prompts = table.placed_columns(island, pe)
        self.tokens = SharedCount(table, tokens)  # of prompts and outputs
        self.prompts = SharedCount(table, prompts)  # of prompts that the worker has yet to compute


class PlacedChanges:
    """Tells which workers' counts have changed. A look takes a few microseconds, however many workers there are."""

    def __init__(self, table: GatewayTable, workers: Iterable[PlacedTokens]) -> None:
        self._table = table
        index = table.placed_index([column for worker in workers for column in worker.columns])
        self._index = index.ravel()  # worker by worker
        self._cells_each = 2 * index.shape[1]
        self._seen = table.cells_at(self._index)

    def look(self) -> list[int]:
        """Returns the workers on which any process of any host has placed tokens, or taken some back, since the last
        look.

        Workers are numbered as the constructor got them. One may be named more than once.
        """
        before, self._seen = self._seen, self._table.cells_at(self._index)
        changed: list[int] = (self._seen != before).nonzero()[0].tolist()
        return [cell // self._cells_each for cell in changed]
