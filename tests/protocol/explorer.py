"""All worlds that can be reached, breadth first, so that what goes wrong is found by a shortest way to it."""

import gc
import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from unittest.mock import patch

from tests.protocol.small_island import Shape
from tests.protocol.snapshot import load, save
from tests.protocol.world import Action, Limits, World

OBJECTS = 100_000


@dataclass(frozen=True)
class Finding:
    what: str
    way: tuple[Action, ...]

    def __str__(self) -> str:
        return f"{self.what}\nafter " + ", ".join(f"{name} {number}" for name, number in self.way)


@dataclass(frozen=True)
class Explored:
    """The result. worlds: distinct ones. complete: every reachable world was visited."""

    worlds: int
    complete: bool
    finding: Finding | None


@dataclass(frozen=True)
class _Reached:
    snapshot: bytes
    actions: tuple[Action, ...]
    way: tuple[Action, ...]


def explore(limits: Limits, shape: Shape, most_worlds: int, begin: tuple[Action, ...] = ()) -> Explored:
    """Explores until the first finding, or until most_worlds are known. Checks each world, and that it comes to an end
    once nobody calls any more. begin: events before the first world."""
    with _no_waiting():
        world = World(limits, shape)
        for action in begin:
            assert action in world.actions(), f"{action} cannot happen"
            world.act(action)
            assert not world.findings, world.findings
        first = save(world)
        known = {_digest(first)}
        todo = deque([_Reached(first, tuple(world.actions()), begin)])
        while todo:
            reached = todo.popleft()
            for action in reached.actions:
                way = (*reached.way, action)
                world = load(reached.snapshot)
                world.act(action)
                snapshot = save(world)
                digest = _digest(snapshot)
                if digest in known:
                    continue
                actions = tuple(world.actions())
                if not world.findings:
                    world.come_to_an_end()
                if world.findings:
                    return Explored(len(known), False, Finding(world.findings[0], way))
                if len(known) == most_worlds:
                    return Explored(len(known), False, None)
                known.add(digest)
                todo.append(_Reached(snapshot, actions, way))
    return Explored(len(known), True, None)


def _digest(snapshot: bytes) -> bytes:
    return blake2b(snapshot, digest_size=16).digest()


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Lets every step look at everything, and none wait, and mutes logs of refusals. A world is many objects, so
    garbage is collected after many worlds only."""
    disabled, threshold = logging.root.manager.disable, gc.get_threshold()
    logging.disable(logging.CRITICAL)
    gc.set_threshold(OBJECTS)
    try:
        with (
            patch("tandem.workers.handoff.handoff.RECALL_POLL_SECONDS", 0.0),
            patch("tandem.workers.handoff.handoff.PATIENCE_SECONDS", 0.0),
        ):
            yield
    finally:
        gc.set_threshold(*threshold)
        logging.disable(disabled)
