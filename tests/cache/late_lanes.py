"""Copies that are made as late as they may be, on a CPU: a reader or writer that does not wait finds or leaves wrong
pages."""

from collections.abc import Callable, Sequence
from functools import partial
from random import Random

from torch import Tensor

from tandem.cache.paged_cache import PagedKVCache
from tandem.cache.store.copies import Copy, Moves
from tandem.cache.store.host_store import HostStore
from tandem.cache.store.lanes import Layers
from tandem.cache.store.stream_lanes import strips


class LateCopy:
    """Its stages are made when somebody waits for them, after the copies before it on its lane."""

    def __init__(
        self, before: "LateCopy | None", behind: Sequence[Copy], stages: list[Callable[[], None]], looks: int | None
    ) -> None:
        """looks: after so many looks it is made, too."""
        self._before, self._behind, self._stages, self._num_done = before, behind, stages, 0
        self._looks = looks

    def is_done(self) -> bool:
        if self._looks is not None:
            self._looks -= 1
            if self._looks <= 0:
                self.wait()
        return self._num_done == len(self._stages)

    def wait(self, stage: int | None = None) -> None:
        if self._num_done == 0:
            for copy in (self._before, *self._behind):
                if copy is not None:
                    copy.wait()
        end = len(self._stages) if stage is None else min(stage + 1, len(self._stages))
        while self._num_done < end:
            self._stages[self._num_done]()
            self._num_done += 1
        self._before, self._behind = None, ()

    def finish(self) -> None:
        self.wait()

    @property
    def seconds(self) -> float:
        return 0.0


class LateLanes:
    def __init__(
        self,
        pools: Sequence[Tensor],
        memory: Sequence[Tensor],
        layers: Layers,
        begins: Sequence[int],
        random: Random | None = None,
        most_looks: int | None = None,
    ) -> None:
        """random: some copies are made early, as they may be, too. most_looks: copies are made after at most so many
        looks at them; None: only once somebody waits."""
        self._pools = [pool.view(pool.shape[0], -1).view(memory[0].dtype) for pool in pools]
        self._memories, self._random = [memory], random
        self._cuts = [strips(of, pool.shape[1], begins) for of, pool in zip(layers, self._pools, strict=True)]
        self._most_looks = most_looks
        self._last: list[LateCopy | None] = [None, None]
        self.made: list[LateCopy] = []

    def copy(
        self, moves: Sequence[Moves], behind: Sequence[Copy], *, up: bool, last: Callable[[], None] | None = None
    ) -> LateCopy:
        stages: list[Callable[[], None]] = [
            lambda at=at: self._move(moves, at, up=up) for at in range(len(self._cuts[0]) - 1 if up else 1)
        ]
        if not moves:
            stages = []
        if last is not None:
            stages.append(last)
        looks = None if self._most_looks is None else (self._random or Random(0)).randint(1, self._most_looks)
        self._last[up] = copy = LateCopy(self._last[up], behind, stages, looks)
        self.made.append(copy)
        if self._random is not None and self._random.random() < 0.2:
            self._random.choice(self.made).wait()
        return copy

    def extend(self, memory: Sequence[Tensor]) -> None:
        self._memories.append([of.view(pool.dtype) for of, pool in zip(memory, self._pools, strict=True)])

    def _move(self, moves: Sequence[Moves], stage: int, *, up: bool) -> None:
        for group, pages, slots, number in moves:
            part = slice(*self._cuts[group][stage : stage + 2]) if up else slice(None)
            for page, slot in zip(pages.tolist(), slots.tolist(), strict=True):
                pool, memory = self._pools[group][page, part], self._memories[number][group][slot, part]
                (pool if up else memory).copy_(memory if up else pool)


def keep_late(cache: PagedKVCache, slots: Sequence[int], seed: int | None, *, verify: bool = False) -> HostStore:
    """A store below a cache, whose copies are late. Pages come up in a stage for each two layers. seed: chooses the
    copies that are made early; None: none is."""
    pools = [group.site.pool for group in cache._groups]
    layers = [group.layers for group in cache.layout.groups]
    make = partial(LateLanes, random=None if seed is None else Random(seed))
    begins = list(range(0, cache.layout.num_layers, 2))
    store = HostStore(pools, slots, layers=layers, begins=begins, verify=verify, make_lanes=make)
    cache.keep_evicted(store)
    return store


def await_copies(cache: PagedKVCache) -> None:
    """Waits for copies, as a caller does before it lets a peer write."""
    past = cache.copies_past()
    if past is not None:
        assert not past()
        for queued in list(cache._pools.copies._under_way.values()):
            queued.copy.finish()
        assert past()
