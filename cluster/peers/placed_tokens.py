"""How much a worker has to do: what this gateway process, and all of them on all hosts, have placed on it."""

from tandem.cluster.peers.table import GatewayTable


class SharedCount:
    """A count of this process, and the sum of all processes' counts. A routing decision reads two for each worker."""

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
    """Of one worker in one epoch.

    The table counts a worker's epochs together. Tokens of an old one are taken back as its requests end.
    """

    def __init__(self, table: GatewayTable, island: int, pe: int) -> None:
        """island: its number in Membership."""
        tokens, prompts = table.placed_columns(island, pe)
        self.tokens = SharedCount(table, tokens)  # of prompts and outputs
        self.prompts = SharedCount(table, prompts)  # of prompts that the worker has yet to compute
