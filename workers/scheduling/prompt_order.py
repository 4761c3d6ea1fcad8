"""Orders prompts: first those whose first token can still come in time."""

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from tandem.workers.requests.prompt import Prompt
from tandem.workers.scheduling.ageing import level
from tandem.workers.scheduling.batch import Chunk

SHARE = 1 / 8  # of the prompt tokens, for prompts that are late or have no target
AGAIN_SECONDS = 0.005  # after which turns are told anew, though no prompt has come or gone
MOST_PLANNED = 256  # prompts of a plan, which takes some 0.1 ms


class _Entry(NamedTuple):
    """One prompt. Entries are sorted by deadline, and of equal ones by arrival."""

    deadline: float
    number: int  # counted as prompts come
    tokens: int
    prompt: Prompt


_Arrival = tuple[int, Prompt]
"""A prompt after its number, by which it is sorted."""


class PromptOrder:
    """The prompts of a scheduler, by their turns. Pure: it is told the time.

    Prompts of lower priorities go first, and a waiting prompt rises by a priority each priority_seconds. Within a
    priority, prompts without targets go in the order of arrival. With targets

    1. prompts that can be in time go first, the earliest deadline before others,
    2. then prompts without a target, as they came,
    3. then late ones, as they came.

    Moore and Hodgson's algorithm says which can be in time: it makes the fewest jobs late on one machine (J. M. Moore,
    "An n job, one machine sequencing algorithm for minimizing the number of late jobs", 1968). It is asked again as
    prompts come, end and grow. So a short prompt passes a long one between two chunks.

    A plan has at most MOST_PLANNED prompts, with the earliest deadlines. Others count as in time until a plan has them.
    While there are more, a prompt that one plan makes late has no part in the next one. So a few short plans look
    through a burst (docs/decisions/0140).

    Groups 2 and 3 get at least one prompt token in eight, the oldest prompt first. When that share is due, their oldest
    prompt without room is also the first to get room. So no prompt starves.
    """

    def __init__(self, priority_seconds: float = 30.0) -> None:
        self._priority_seconds = priority_seconds
        self._now = 0.0
        self._ranked: dict[Prompt, None] = {}  # those whose priority is not 0
        self._entries: dict[Prompt, _Entry] = {}
        self._undated: dict[Prompt, int] = {}  # those without a target, and their numbers
        self._dated: list[_Entry] = []  # those whose deadline is to come, sorted
        self._past: list[_Arrival] = []  # those whose deadline is over, sorted
        self._count = 0
        self._timely: dict[Prompt, None] = {}  # of those dated, by deadline
        self._late: list[_Arrival] = []  # the others of those dated, sorted
        self._again = -math.inf  # when these two are told anew
        self._given: list[tuple[Prompt, int, bool]] = []  # of the last batch: its computed tokens before, and if timely
        self._owed = 0.0  # tokens of groups 2 and 3 that the first one had
        self._is_due = False  # whether they are to be computed now
        self._elder: Prompt | None = None  # whose turn for room it is

    def add(self, prompt: Prompt) -> None:
        entry = self._entries[prompt] = _Entry(prompt.deadline, self._count, prompt.num_tokens, prompt)
        self._count += 1
        if prompt.spec.priority:
            self._ranked[prompt] = None
        if entry.deadline == math.inf:
            self._undated[prompt] = entry.number
        else:
            insort(self._dated, entry)
            self._timely[prompt] = None  # the last one, until update()
        self._again = -math.inf

    def remove(self, prompt: Prompt) -> None:
        """Idempotent."""
        entry = self._entries.pop(prompt, None)
        self._ranked.pop(prompt, None)
        if entry is None:
            return
        self._again = -math.inf
        if self._undated.pop(prompt, None) is not None:
            return
        index = bisect_left(self._dated, entry)
        if self._dated[index : index + 1] == [entry]:
            del self._dated[index]
        else:
            del self._past[bisect_left(self._past, (entry.number,))]
        if not self._has_targets:
            self._timely, self._late = {}, []

    def update(self, now: float, rate: Callable[[], float]) -> None:
        """Turns as they are now, in the time of deadlines. rate: called where a plan is due; prompt tokens a second."""
        if self._ranked:
            self._now = now
        if not self._has_targets:
            return
        total, behind = self._take_given()
        if now >= self._again:
            self._divide(now, rate())
            self._again = now + AGAIN_SECONDS
        self._owed = max(0.0, self._owed + SHARE * total - behind) if self._has_behind else 0.0
        self._is_due = self._owed >= max(total, 1)
        self._owed = min(self._owed, max(total, 1))

    def gave(self, chunks: Sequence[Chunk]) -> None:
        """Notes the chunks of the next step."""
        if self._has_targets:
            self._given = [(prompt, prompt.computed, prompt in self._timely) for prompt, _ in chunks]

    def for_room(self, waiting: Collection[Prompt]) -> Iterator[Prompt]:
        """Prompts that wait for room, by their turns. They may leave `waiting` meanwhile."""
        if not self._has_targets:
            yield from self._by_level(tuple(waiting))
            return
        if self._is_due and self._elder not in waiting:
            self._elder = next((prompt for prompt in self._behind() if prompt in waiting), None)
        if self._elder is not None and self._elder in waiting:
            yield self._elder
        yield from self._by_level(prompt for prompt in self._turns() if prompt in waiting)

    def for_chunks(self, running: Collection[Prompt]) -> Iterator[Prompt]:
        """Yields prompts that have room, by their turns."""
        if not self._has_targets:
            yield from self._by_level(running)
            return
        elders: set[Prompt] = set()
        owed = self._owed if self._is_due else 0
        for prompt in self._behind():
            if owed <= 0:
                break
            if prompt in running:
                owed -= prompt.num_tokens - prompt.computed
                elders.add(prompt)
                yield prompt
        yield from self._by_level(prompt for prompt in self._turns() if prompt in running and prompt not in elders)

    def _by_level(self, prompts: Iterable[Prompt]) -> Iterable[Prompt]:
        """Sorts prompts by priority, and keeps the given order within a priority."""
        return sorted(prompts, key=self._level) if self._ranked else prompts

    def _level(self, prompt: Prompt) -> int:
        return level(prompt.spec.priority, self._now - prompt.arrived, self._priority_seconds)

    @property
    def _has_targets(self) -> bool:
        return len(self._undated) < len(self._entries)

    @property
    def _has_behind(self) -> bool:
        return bool(self._undated or self._past or self._late)

    def _turns(self) -> Iterator[Prompt]:
        late = (prompt for _, prompt in heapq.merge(self._past, self._late))
        return chain(tuple(self._timely), tuple(self._undated), late)

    def _behind(self) -> Iterator[Prompt]:
        """Yields groups 2 and 3, as they came."""
        undated = ((number, prompt) for prompt, number in self._undated.items())
        return (prompt for _, prompt in heapq.merge(undated, self._past, self._late))

    def _take_given(self) -> tuple[int, int]:
        """Returns the numbers of tokens computed since the last update: all, and of groups 2 and 3."""
        total = behind = 0
        for prompt, before, timely in self._given:
            total += prompt.computed - before
            behind += 0 if timely else prompt.computed - before
        self._given = []
        return total, behind

    def _divide(self, now: float, rate: float) -> None:
        """Plans anew."""
        over = bisect_left(self._dated, (now,))
        if over:
            self._past += [(entry.number, entry.prompt) for entry in self._dated[:over]]
            self._past.sort()
            del self._dated[:over]
        dated = self._dated
        if len(dated) > MOST_PLANNED:
            dated = [entry for entry in dated if entry.prompt in self._timely]
        timely = in_time(dated[:MOST_PLANNED], now, rate * (1 - SHARE) if self._has_behind else rate)
        timely.update((entry.prompt, None) for entry in dated[MOST_PLANNED:])
        self._timely = timely
        self._late = sorted((entry.number, entry.prompt) for entry in self._dated if entry.prompt not in timely)


def in_time(dated: Sequence[_Entry], now: float, rate: float) -> dict[Prompt, None]:
    """The most prompts that can be in time together, in their order."""
    taken: list[tuple[float, int]] = []  # a heap with the longest on top: its seconds, negative, and its index
    dropped: set[int] = set()
    end = now
    for index, (deadline, _, tokens, prompt) in enumerate(dated):
        seconds = (tokens - prompt.computed) / rate
        if now + seconds > deadline:  # alone, even
            dropped.add(index)
            continue
        end += seconds
        heapq.heappush(taken, (-seconds, index))
        if end > deadline:
            negative, longest = heapq.heappop(taken)
            end += negative
            dropped.add(longest)
    return {entry.prompt: None for index, entry in enumerate(dated) if index not in dropped}
