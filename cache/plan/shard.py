"""The part of a model that one rank of a worker holds."""

from dataclasses import dataclass

from tandem.cache.plan.arrays import integer
from tandem.cache.plan.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank of `size` equal ones. Its ranges of heads, experts and columns follow from part().

    A worker of one GPU holds the whole model, which is the default. InvalidArgument when rank or size is out of range.
    """

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        integer("size of the shard", self.size, least=1)
        if not 0 <= integer("rank of the shard", self.rank) < self.size:
            raise InvalidArgument(f"rank of the shard is {self.rank}; 0 … {self.size - 1} are accepted")

    def part(self, name: str, count: int) -> range:
        """This rank's of `count` heads, experts or columns. InvalidArgument when the ranks cannot have as many each."""
        each, rest = divmod(count, self.size)
        if rest:
            raise InvalidArgument(f"{name} is {count}; it must be a multiple of the {self.size} ranks that divide it")
        return range(self.rank * each, (self.rank + 1) * each)


WHOLE = Shard()
