"""Orders of a joint step's two attentions within a layer: the worker's own, and others to compare it with."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch import Tensor

from tandem.cache.attention.forward import Attention
from tandem.workers.runner.mixed_attention import MixedAttention

Attend = Callable[[Attention, slice, Any], Tensor]


class Joined(MixedAttention):
    """One after the other, each in memory of its own, then joined by a copy."""

    def _both(self, q: Tensor, attend: Attend) -> Tensor:
        return torch.cat([attend(self._steps, self._rows, None), attend(self._prompts, self._rest, None)])


class InTurn(MixedAttention):
    """One after the other."""

    def __init__(self, steps: Attention, prompts: Attention, num_rows: int, side: torch.cuda.Stream | None) -> None:
        super().__init__(steps, prompts, num_rows, None)


class First(MixedAttention):
    """Side by side; blocks of the prompts' kernels start before those of the rows."""

    _high: torch.cuda.Stream | None = None

    def __init__(self, steps: Attention, prompts: Attention, num_rows: int, side: torch.cuda.Stream | None) -> None:
        if First._high is None:
            First._high = torch.cuda.Stream(priority=-1)
        super().__init__(steps, prompts, num_rows, First._high)


class StoredFirst(MixedAttention):
    """Side by side once the prompts' K and V are stored: the prompts' attention is ready as early as the rows', which
    would fill the device."""

    forks: ClassVar[list[Callable[[], None]]] = []  # at most one, while a layer runs

    def _both(self, q: Tensor, attend: Attend) -> Tensor:
        output = torch.empty_like(q, memory_format=torch.contiguous_format)
        current, side = torch.cuda.current_stream(q.device), self._side
        assert side is not None

        def fork() -> None:
            side.wait_stream(current)
            torch.cuda.set_stream(side)

        self.forks.append(fork)
        try:
            self._into(output, self._prompts, self._rest, attend)
        finally:
            self.forks.clear()
            torch.cuda.set_stream(current)
        self._into(output, self._steps, self._rows, attend)
        current.wait_stream(side)
        return output


class StoredFirstHigh(StoredFirst, First):
    """Both."""


def _run_with_fork(self: Any, plan: Any, layer: int, x: Any) -> Tensor:
    """KVBuffers.run with a fork of StoredFirst in it."""
    q, k = (x.q, x.k) if x.norm is None else x.norm.apply(x.q, x.k)
    q, _ = self.kernels.append(layer, q, k, x.v, plan.rotation, self)
    for fork in StoredFirst.forks:
        fork()
    return self.attend(layer, q, plan.rotation, x.sinks, x.out)


# Of each order the class; whether the rows' kernel may start while the kernel before it ends; FlashInfer's backend.
ORDERS: Mapping[str, tuple[type[MixedAttention], bool, str | None]] = {
    "joined": (Joined, True, None),
    "in turn": (InTurn, True, None),
    "beside": (MixedAttention, True, None),
    "beside, prompts first": (First, True, None),
    "stored first": (StoredFirst, True, None),
    "stored first, prompts first": (StoredFirstHigh, True, None),
    "stored first, prompts first, rows wait": (StoredFirstHigh, False, None),
    "beside, fa2": (MixedAttention, True, "fa2"),
    "stored first, prompts first, rows wait, fa2": (StoredFirstHigh, False, "fa2"),
}


@contextmanager
def in_order(name: str) -> Iterator[None]:
    """Captures graphs in this order while the context lasts. Prompts have the order, too: buffers made meanwhile have
    its backend."""
    made, dependent, backend = ORDERS[name]
    with ExitStack() as stack:
        stack.enter_context(patch("tandem.workers.runner.decode_graphs.MixedAttention", made))
        stack.enter_context(patch("tandem.cache.kernels.paged.steps.KVBuffers.run", _run_with_fork))
        if not dependent:
            options = {"PDL": False}
            stack.enter_context(patch("tandem.cache.kernels.triton.decode.launch_options", lambda _: options))
        if backend is not None:
            chosen = "tandem.cache.kernels.flashinfer.prompts.choose_backend"
            stack.enter_context(patch(chosen, lambda *_: backend))
        yield
