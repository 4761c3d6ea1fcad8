"""Ids for the sequences of one cache."""


class SequenceIds:
    """Gives each id once. Owned by the step thread."""

    def __init__(self) -> None:
        self._next = 1

    def take(self) -> int:
        self._next += 1
        return self._next - 1
