"""How much a worker has to do: what this gateway process, and all of them, have placed on it."""

from tandem.cluster.peers.table import GatewayTable


class PlacedTokens:
    """Of one worker in one epoch. The table counts a worker's epochs together: those of an old one are taken back."""

    def __init__(self, table: GatewayTable, island: int, pe: int) -> None:
        """island: its number in Membership."""
        self.own = 0
        self._table = table
        self._column, self._prompts = table.placed_columns(island, pe)

    def add(self, tokens: int) -> None:
        """Of prompts and outputs."""
        self.own += tokens
        self._table.add(self._column, tokens)

    def add_prompt(self, tokens: int) -> None:
        """Of a prompt that the worker has yet to compute."""
        self._table.add(self._prompts, tokens)

    @property
    def of_all(self) -> int:
        return self._table.total(self._column)

    @property
    def prompts_of_all(self) -> int:
        return self._table.total(self._prompts)
