"""The part of a model that one rank of a worker holds."""

from dataclasses import dataclass
from typing import NamedTuple

from tandem.cache.plan.arrays import integer
from tandem.cache.plan.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank of `size` equal ones. Its ranges of heads, experts and columns follow from part().

    first_layer: the layer of the model that is layer 0 here, of a stage in a pipeline. A worker of one GPU holds the
    whole model, which is the default. InvalidArgument when a field is out of range.
    """

    rank: int = 0
    size: int = 1
    first_layer: int = 0

    def __post_init__(self) -> None:
        integer("size of the shard", self.size, least=1)
        integer("first_layer of the shard", self.first_layer, least=0)
        if not 0 <= integer("rank of the shard", self.rank) < self.size:
            raise InvalidArgument(f"rank of the shard is {self.rank}; it must be from 0 to {self.size - 1}")

    def part(self, name: str, count: int) -> range:
        """This rank's of `count` heads, experts or columns. InvalidArgument when the ranks cannot have as many each."""
        each, rest = divmod(count, self.size)
        if rest:
            raise InvalidArgument(f"{name} is {count}; it must be a multiple of the {self.size} ranks that divide it")
        return range(self.rank * each, (self.rank + 1) * each)

    def some(self, name: str, count: int) -> range:
        """This rank's of `count` experts or tokens: one at least, and one more or less than others have.
        InvalidArgument when there are fewer than ranks."""
        if count < self.size:
            raise InvalidArgument(f"{name} is {count}; it must be at least one for each of the {self.size} ranks")
        return range(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def replicas(self, name: str, heads: int) -> int:
        """How many ranks have the same of `heads` KV heads: 1 while each rank has one of its own. InvalidArgument when
        the ranks can neither divide the heads nor share them evenly."""
        if heads % self.size and self.size % heads:
            raise InvalidArgument(
                f"{name} is {heads}; it must be a multiple or a divisor of the {self.size} ranks that divide it"
            )
        return max(1, self.size // heads)

    def kv_heads(self, name: str, heads: int) -> range:
        """Returns this rank's part of `heads` KV heads, at least one. See replicas()."""
        each = max(1, heads // self.size)
        first = self.rank // self.replicas(name, heads) * each
        return range(first, first + each)


@dataclass(frozen=True, slots=True)
class HeldNumbers:
    """A run of `count` numbers that a rank holds: they begin at `begin` here, and at `whole` among the numbers of all
    ranks.

    sharers: how many consecutive ranks hold the run. Each computes it, by products of one shape, so the bits are equal.
    """

    begin: int
    whole: int
    count: int
    sharers: int = 1


class HeadRun(NamedTuple):
    """Consecutive KV heads of a rank, and the PE and heads there that are the same ones."""

    pe: int
    heads: range
    peer_heads: range


def map_heads(rank: int, num_heads: int, num_peer_heads: int, first_pe: int = 0) -> tuple[HeadRun, ...]:
    """Maps the num_heads KV heads of a rank to peers that hold num_peer_heads each. The first peer is PE first_pe.
    InvalidArgument unless one of the numbers divides the other."""
    few, many = sorted((num_heads, num_peer_heads))
    if integer("num_heads", few, least=1) and many % few:
        raise InvalidArgument(f"num_heads is {num_heads}; it must be a multiple or a divisor of {num_peer_heads}")
    if num_heads <= num_peer_heads:
        ranks = num_peer_heads // num_heads  # that share a peer
        begin = rank % ranks * num_heads
        return (HeadRun(first_pe + rank // ranks, range(num_heads), range(begin, begin + num_heads)),)
    peers = num_heads // num_peer_heads
    return tuple(
        HeadRun(first_pe + rank * peers + peer, range(begin, begin + num_peer_heads), range(num_peer_heads))
        for peer, begin in enumerate(range(0, num_heads, num_peer_heads))
    )


WHOLE = Shard()
