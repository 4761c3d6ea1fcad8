"""The processes of an island: each worker has some, its ranks. The first rank leads."""

MAX_RANKS = 64
"""The most ranks of a worker; a word of a signal has room for their number."""
MAX_GPU_RANKS = 8
"""The most ranks of a worker on GPUs; an argument of kernels has room for their addresses."""


class IslandRanks(tuple[int, ...]):
    """How many ranks each worker has, in the order of PEs. Processes are numbered by worker, then by rank."""

    __slots__ = ()

    @property
    def processes(self) -> int:
        return sum(self)

    @property
    def has_several(self) -> bool:
        """Whether any worker has more than one rank."""
        return max(self, default=1) > 1

    def process(self, pe: int, rank: int = 0) -> int:
        """The number of that rank's process; of the leader's by default."""
        return sum(self[:pe]) + rank

    @property
    def leaders(self) -> list[int]:
        """The processes of the first ranks, in the order of PEs."""
        return [self.process(pe) for pe in range(len(self))]
