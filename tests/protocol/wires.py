"""A transport whose writes and posts lie on a wire until they are delivered, one by one, by whoever explores."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tandem.cache.plan.arrays import Int32Array
from tandem.cache.plan.stored_layers import Stages
from tandem.transfer.errors import PeerGone, TransportError
from tandem.transfer.membership import TransportConfig
from tandem.transfer.transport import Fence, Int64Array, QuietFence, Transport
from tests.protocol.token_memory import TokenMemory


@dataclass(frozen=True, eq=False)
class Write:
    slots: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Post:
    row: int
    signal: int
    payload: int


@dataclass(eq=False)
class Mark:
    """A fence. It is quiet when it comes out at the other end."""

    arrived: bool = False

    def is_quiet(self) -> bool:
        return self.arrived


@dataclass(eq=False)
class Endpoint:
    """One PE's memory and mailbox, and the writes on their way there from the other PE of the island.

    In the order of the calls: that writes may overtake each other changes nothing, for all that are under way count as
    landing at any moment.
    """

    memory: TokenMemory
    mailbox: Int64Array
    incoming: deque[Write | Post | Mark] = field(default_factory=deque)

    def cut(self) -> None:
        """Drops everything on its way here."""
        self.incoming.clear()

    def pass_all(self) -> None:
        """Completes all fences towards here."""
        for item in self.incoming:
            if isinstance(item, Mark):
                item.arrived = True

    def deliver(self) -> None:
        """Lands the next write or post."""
        item = self.incoming.popleft()
        if isinstance(item, Write):
            self.memory.tokens[list(item.slots)] = item.tokens
        elif isinstance(item, Post):
            self.mailbox[item.row] = item.signal, item.payload
        self._pass_marks()

    def mark(self) -> Mark:
        mark = Mark()
        self.incoming.append(mark)
        self._pass_marks()
        return mark

    def _pass_marks(self) -> None:
        while self.incoming and isinstance(mark := self.incoming[0], Mark):
            self.incoming.popleft()
            mark.arrived = True

    def written(self) -> list[Write]:
        """Returns the writes that may still land."""
        return [item for item in self.incoming if isinstance(item, Write)]


class WireTransport(Transport):
    """PE `config.pe` of an island of two; every write goes to the other. posts_that_fail: the next ones."""

    def __init__(self, config: TransportConfig, endpoints: Sequence[Endpoint]) -> None:
        super().__init__(config)
        self._own, self._other = endpoints[config.pe], endpoints[1 - config.pe]
        self.posts_that_fail = 0
        self._is_cut = 1 - config.pe in config.vacant

    def cut(self, pe: int) -> None:
        """Cuts off a PE, as an elastic transport does: see Transport."""
        self._is_cut = True
        self._own.cut()
        self._other.pass_all()

    def reach_endpoint(self, other: Endpoint) -> None:
        """Does the work of offer() and reach()."""
        self._next = other

    def admit(self, pe: int) -> None:
        self._other, self._is_cut = self._next, False
        del self._next

    def _check_there(self) -> None:
        if self._is_cut:
            raise PeerGone("the peer was cut")

    def open(self) -> bytes:
        return b""

    def join(self, handles: Sequence[bytes]) -> None:
        self._joined = True

    @property
    def pools(self) -> tuple[Tensor, ...]:
        return (torch.zeros(self.num_pages[0], *self.layout.page_shape(0)),)

    def write_tokens(
        self, pe: int, group: int, layer: int, k: Tensor, v: Tensor | None, token_indices: Tensor, slots: Tensor
    ) -> None:
        self._check_there()
        tokens = k[token_indices, 0, 0].long()
        self._other.incoming.append(Write(tuple(slots.tolist()), tuple(tokens.tolist())))

    def write_slots(
        self, pe: int, group: int, source_slots: Int32Array, target_slots: Int32Array, stages: Stages = ()
    ) -> None:
        self._check_there()
        tokens = self._own.memory.tokens[source_slots]
        self._other.incoming.append(Write(tuple(target_slots.tolist()), tuple(tokens.tolist())))

    def fence(self, pe: int) -> Fence:
        return QuietFence() if self._is_cut else self._other.mark()

    def post(self, pe: int, row: int, signal: int, payload: int | Tensor) -> None:
        if pe == self.pe:
            self._own.mailbox[row] = signal, int(payload)
            return
        self._check_there()
        if self.posts_that_fail:
            self.posts_that_fail -= 1
            raise TransportError("a scripted post fails")
        self._other.incoming.append(Post(row, signal, int(payload)))

    def mailbox(self) -> Int64Array:
        return self._own.mailbox.copy()

    def close(self) -> None:
        self._joined = False
