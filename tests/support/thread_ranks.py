"""The ranks of a worker as threads of one process, with a plain sum and gather."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
SECONDS = 60.0  # after which a rank that waits for others gives up


class ThreadRank:
    """One rank. parts: a place for each rank's tensor."""

    def __init__(self, rank: int, parts: list[Tensor], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(parts)
        self._parts, self._barrier = parts, barrier

    def sum(self, x: Tensor) -> Tensor:
        """See Ranks."""
        total = torch.zeros_like(x, dtype=torch.float32)
        for part in self._exchange(x):
            total += part.float()
        return total.to(x.dtype)

    def gather(self, x: Tensor, columns: int) -> Tensor:
        """See Ranks."""
        return torch.cat(self._exchange(x), 1)

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self._parts[self.rank] = x.clone()
        self._barrier.wait(SECONDS)
        parts = list(self._parts)
        self._barrier.wait(SECONDS)
        return parts


class RankInTurns(ThreadRank):
    """One of several ranks that compute one at a time, as Triton's interpreter requires. `turn` is held while it
    computes."""

    def __init__(self, rank: int, parts: list[Tensor], barrier: threading.Barrier, turn: threading.Lock) -> None:
        super().__init__(rank, parts, barrier)
        self.turn = turn

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self.turn.release()
        try:
            return super()._exchange(x)
        finally:
            self.turn.acquire()


def thread_ranks(size: int) -> list[ThreadRank]:
    parts, barrier = [torch.empty(0)] * size, threading.Barrier(size)
    return [ThreadRank(rank, parts, barrier) for rank in range(size)]


def ranks_in_turns(size: int) -> list[RankInTurns]:
    parts, barrier, turn = [torch.empty(0)] * size, threading.Barrier(size), threading.Lock()
    return [RankInTurns(rank, parts, barrier, turn) for rank in range(size)]


def on_all(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Runs the ranks' calls side by side, and returns their results."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [one.result() for one in [pool.submit(call) for call in calls]]
