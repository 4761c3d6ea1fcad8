"""Another shape for a running island: the order, the processes that stay, and the outcome."""

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Lock

from tandem.workers.config import Role

MAX_WORKERS = 256  # of one role, as the configuration has it


@dataclass(frozen=True)
class Shape:
    """The number of workers of each role in an island; PEs count prefill workers first."""

    num_prefill: int
    num_decode: int

    @property
    def roles(self) -> list[Role]:
        return [Role.PREFILL] * self.num_prefill + [Role.DECODE] * self.num_decode


@dataclass(frozen=True)
class ScaleOrder:
    """An order for another shape of an island, with its numbers in range, or for another number of islands."""

    number: int  # unique in one gateway
    island: str  # may be empty where there is only one
    num_prefill: int | None  # None: as many as now
    num_decode: int | None
    num_islands: int | None = None

    @property
    def words(self) -> str:
        """Returns the order in words, such as "num_prefill is 2"."""
        asked = {"num_prefill": self.num_prefill, "num_decode": self.num_decode}
        return " and ".join(f"{name} is {number}" for name, number in asked.items() if number is not None)

    def shape(self, now: Shape) -> Shape:
        return Shape(
            now.num_prefill if self.num_prefill is None else self.num_prefill,
            now.num_decode if self.num_decode is None else self.num_decode,
        )


@dataclass(frozen=True)
class ScaleOutcome:
    """The result of an order: the numbers of processes that were kept, started and ended.

    For an order of islands these numbers count islands, and num_islands is set.
    """

    island: str
    epoch: int
    shape: Shape
    kept: int
    started: int
    ended: int
    seconds_away: float  # in which the island took no requests
    num_islands: int = 0


@dataclass(frozen=True)
class ScalingState:
    """The state of the scaling policy. waits_for: in words, empty if the policy has the islands that it wants."""

    min_islands: int
    max_islands: int
    wanted_islands: int
    waits_for: str = ""


def keep_members(before: Sequence[Role], after: Sequence[Role], *, turn: bool = True) -> list[int | None]:
    """Returns for each PE of the next epoch the PE of this epoch whose process takes it; None for a new process.

    As many processes as possible keep their role. turn: as many as possible of the others change it.
    """
    left = {role: deque(pe for pe, held in enumerate(before) if held == role) for role in Role}
    taken: list[int | None] = [left[role].popleft() if left[role] else None for role in after]
    others = iter(sorted(pe for pes in left.values() for pe in pes) if turn else ())
    return [next(others, None) if pe is None else pe for pe in taken]


@dataclass(frozen=True)
class WorkerChange:
    """The changes that bring an island to another shape while its other workers serve."""

    joining: tuple[Role, ...]
    turning: Mapping[int, Role]  # workers, by their PEs, that get this role
    leaving: tuple[int, ...]  # PEs


def plan_change(now: Mapping[int, Role], shape: Shape, *, turn: bool = True) -> WorkerChange:
    """Plans the change. now: the role of each PE. As many workers as possible stay as they are, lower PEs first. turn:
    as many as possible of the others get another role."""
    pes = sorted(now)
    kept = keep_members([now[pe] for pe in pes], shape.roles, turn=turn)
    taken = {pes[old]: role for old, role in zip(kept, shape.roles, strict=True) if old is not None}
    return WorkerChange(
        tuple(role for old, role in zip(kept, shape.roles, strict=True) if old is None),
        {pe: role for pe, role in taken.items() if now[pe] != role},
        tuple(pe for pe in pes if pe not in taken),
    )


class ScaleOrders:
    """One island's queue of orders. Any thread adds; the island's thread waits for the first and takes it.

    add() returns a future, which always ends.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._futures: deque[Future[tuple[ScaleOrder, Future[ScaleOutcome]]]] = deque([Future()])  # the last is empty
        self._closed: Exception | None = None

    def add(self, order: ScaleOrder) -> "Future[ScaleOutcome]":
        outcome: Future[ScaleOutcome] = Future()
        with self._lock:
            if self._closed is not None:
                outcome.set_exception(self._closed)
            else:
                self._futures[-1].set_result((order, outcome))
                self._futures.append(Future())
        return outcome

    @property
    def first(self) -> "Future[tuple[ScaleOrder, Future[ScaleOutcome]]]":
        """Done once there is an order."""
        return self._futures[0]

    def take(self) -> "tuple[ScaleOrder, Future[ScaleOutcome]]":
        """Returns the first order. Call it only when `first` is done."""
        with self._lock:
            return self._futures.popleft().result()

    def close(self, error: Exception) -> None:
        """Ends waiting and later orders with the error. Idempotent."""
        with self._lock:
            self._closed = error
            while len(self._futures) > 1:
                self._futures.popleft().result()[1].set_exception(error)
