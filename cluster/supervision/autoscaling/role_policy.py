"""Chooses how many prefill and decode workers islands should have: numbers in, another shape out. Starts and ends
nothing."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tandem.cluster.config.scaling import ScalingSection
from tandem.cluster.scaling import MAX_WORKERS, Shape
from tandem.cluster.supervision.autoscaling.sizing import HEADROOM, Pressure, Sizing
from tandem.workers.config import Role

BUSY = 0.9  # of the time: prefill workers that are busier limit the cluster
BACKLOG, MOST = 0.25, 0.5  # of the room on decode workers that waits for prompts
OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


@dataclass(frozen=True)
class RoleLoad:
    """The recent load of each role over all islands. None: too few requests came to tell."""

    queue_seconds: float = 0.0  # how long requests waited for room on decode workers
    prefill_seconds: float = 0.0  # how long prompts took from there until they were computed
    first_token_seconds: float | None = None
    token_seconds: float | None = None
    prompt_tokens_per_second: float = 0.0
    output_tokens_per_second: float = 0.0
    prefill_use: float = 0.0  # the part of the time in which a prefill worker had a prompt
    decode_use: float = 0.0  # the part of the decode workers' positions that was taken
    backlog: float = 0.0  # of what was taken there, the part that waited for its prompt


@dataclass(frozen=True)
class RoleChange:
    """Another shape for an island. why: in words. grows: whether it serves a missed target."""

    island: str
    shape: Shape
    why: str
    grows: bool


def pressures(load: RoleLoad, targets: Mapping[str, float], shapes: Sequence[Shape]) -> dict[Role, Pressure]:
    """Returns the pressure on both roles. A role without a target is left out.

    Requests wait for room because decode workers are too few, unless much of that room waits for prompts of workers
    that are never idle. A late first token is due to what took longer: that wait, or the prompt.
    """
    late_prompts = load.backlog >= (BACKLOG if load.prefill_use >= BUSY else MOST)
    queue = load.queue_seconds
    first = max([value for value in (load.first_token_seconds, queue or None) if value is not None], default=0.0)
    by_queue = queue > load.prefill_seconds and not late_prompts
    figures = {
        "queue_seconds": (Role.PREFILL if late_prompts else Role.DECODE, queue, "requests wait for room"),
        "first_token_seconds": (Role.DECODE if by_queue else Role.PREFILL, first, "first tokens take"),
        "token_seconds": (Role.DECODE, load.token_seconds or 0.0, "tokens take"),
    }
    worst = {Role.PREFILL: (0.0, ""), Role.DECODE: (0.0, "")}
    for name, target in targets.items():
        role, value, about = figures[name]
        if value / target > worst[role][0]:
            worst[role] = value / target, f"{about} {value:.3g} s; scaling.{name} is {target:g}"
    prefill, decode = sum(shape.num_prefill for shape in shapes), sum(shape.num_decode for shape in shapes)
    found = {
        Role.DECODE: Pressure(
            *worst[Role.DECODE],
            load.output_tokens_per_second,
            bool(queue) and not late_prompts,
            math.ceil(load.decode_use * (1 - load.backlog) * decode / HEADROOM),
        )
    }
    if targets.keys() & {"queue_seconds", "first_token_seconds"}:
        found[Role.PREFILL] = Pressure(
            *worst[Role.PREFILL],
            load.prompt_tokens_per_second,
            bool(queue) and late_prompts,
            math.ceil(load.prefill_use * prefill / HEADROOM),
        )
    return found


class RolePolicy:
    """Sizes each role by its own targets, with Sizing, over all islands. One island changes at a time.

    A role that lacks workers gets new ones if scaling.max_workers allows it. Otherwise the other role gives up a
    worker, if it has needed fewer for up_after_seconds. No island gets fewer than min_prefill and min_decode, or more
    than max_workers. Not for several threads.
    """

    def __init__(self, section: ScalingSection, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: see Sizing. section.max_workers must be set."""
        assert section.max_workers is not None
        self._section = section
        self._most = section.max_workers
        self._least = {Role.PREFILL: section.min_prefill, Role.DECODE: section.min_decode}
        self._clock = clock
        self._sizings = {role: Sizing(section, clock) for role in OTHER}
        self._full_until = -math.inf

    def changed(self) -> None:
        """Reports a change of any island's shape to each Sizing."""
        for sizing in self._sizings.values():
            sizing.changed()

    def refused(self) -> None:
        """Records that the last change did not come about. For down_after_seconds no workers are added."""
        self._full_until = self._clock() + self._section.down_after_seconds

    def desired(self, load: RoleLoad, shapes: Mapping[str, Shape]) -> RoleChange | None:
        """Returns the wanted change, or None. Called every second or so. shapes: of all islands, by their names."""
        pressed: list[tuple[float, Role, int, str]] = []
        spare: list[tuple[Role, int]] = []
        for role, pressure in pressures(load, self._section.targets, list(shapes.values())).items():
            count = sum(_count(shape, role) for shape in shapes.values())
            ceiling = min(MAX_WORKERS, self._most - self._least[OTHER[role]])
            least, most = len(shapes) * self._least[role], max(count, len(shapes) * ceiling)
            more = self._sizings[role].desired(pressure, count, least, most) - count
            if more > 0:
                pressed.append((pressure.ratio, role, more, pressure.why))
            elif more < 0:
                spare.append((role, -more))
        for _, role, more, why in sorted(pressed, reverse=True):
            if (change := self._grow(role, more, why, shapes) or self._exchange(role, why, shapes)) is not None:
                return change
        return None if pressed else self._shrink(spare, shapes)

    def _grow(self, role: Role, more: int, why: str, shapes: Mapping[str, Shape]) -> RoleChange | None:
        """Adds workers to the island with the fewest of the role: its part of what all islands lack."""
        if self._clock() < self._full_until:
            return None
        found = [(_count(shape, role), name) for name, shape in shapes.items() if self._room(shape, role) > 0]
        if not found:
            return None
        _, name = min(found)
        added = min(math.ceil(more / len(shapes)), self._room(shapes[name], role))
        return RoleChange(name, _with(shapes[name], role, added), why, grows=True)

    def _exchange(self, role: Role, why: str, shapes: Mapping[str, Shape]) -> RoleChange | None:
        """Turns a worker of the other role, at the island that has most of that role."""
        other = OTHER[role]
        if self._sizings[other].calm_seconds < self._section.up_after_seconds:
            return None
        found = [
            (_count(shape, other), name)
            for name, shape in shapes.items()
            if _count(shape, other) > self._least[other] and _count(shape, role) < MAX_WORKERS
        ]
        if not found:
            return None
        _, name = max(found)
        return RoleChange(name, _with(_with(shapes[name], role, 1), other, -1), why, grows=True)

    def _shrink(self, spare: Sequence[tuple[Role, int]], shapes: Mapping[str, Shape]) -> RoleChange | None:
        for role, fewer in spare:
            count, name = max((_count(shape, role), name) for name, shape in shapes.items())
            ended = min(math.ceil(fewer / len(shapes)), count - self._least[role])
            if ended > 0:
                calm = f"fewer {role.value} workers have been enough for {self._sizings[role].calm_seconds:.0f} s"
                return RoleChange(name, _with(shapes[name], role, -ended), calm, grows=False)
        return None

    def _room(self, shape: Shape, role: Role) -> int:
        """Returns how many more workers of the role the island may get."""
        return min(self._most - shape.num_prefill - shape.num_decode, MAX_WORKERS - _count(shape, role))


def _count(shape: Shape, role: Role) -> int:
    return shape.num_prefill if role is Role.PREFILL else shape.num_decode


def _with(shape: Shape, role: Role, more: int) -> Shape:
    if role is Role.PREFILL:
        return replace(shape, num_prefill=shape.num_prefill + more)
    return replace(shape, num_decode=shape.num_decode + more)
