"""A forward in parts, each by a wrapper of FlashInfer that is planned when the forward's first layer attends.

Wrappers hold the forward that was planned last. So forwards may be begun in any order, but a layer that goes back to an
earlier one plans anew.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.cache.kernels.base import AttentionBackend, InputsT, PeerPool
from tandem.cache.kernels.flashinfer.parts import AttentionPart, ChosenTokens, SeenTokens
from tandem.cache.kernels.triton.pushing import AppendPlan, push_to_peers
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.tables import Send

WORKSPACE_BYTES = 256 << 20
PLAN_BYTES = 8 << 20  # FlashInfer's own size; one step's plan is in it at a time


@dataclass(frozen=True, eq=False)
class EagerPlan(AppendPlan):
    """chosen, seen: the tokens that no part has, which attend to chosen positions, or to all that they see. causal:
    whether tokens see only the positions up to their own."""

    parts: tuple[AttentionPart, ...]
    chosen: ChosenTokens | None = None
    seen: SeenTokens | None = None
    causal: bool = True


class PlannedWrappers(AttentionBackend[InputsT]):
    """An AttentionBackend whose eager plans are EagerPlans."""

    def __init__(self, pool: Tensor) -> None:
        """Takes 256 MiB of workspace on the pool's device. InvalidArgument for a pool that is not on a GPU."""
        if pool.device.type != "cuda":
            raise InvalidArgument(f"the pool is on {pool.device}; it must be on a CUDA device")
        super().__init__(pool)
        self._pool = pool
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=pool.device)
        self._graph_workspace = torch.empty(PLAN_BYTES, dtype=torch.uint8, device=pool.device)
        self._current: EagerPlan | None = None
        self._planned = torch.cuda.Event()

    def push_with_append(
        self, own: EagerPlan, sends: Sequence[Send], peer_pool: PeerPool
    ) -> tuple[EagerPlan, tuple[Send, ...]]:
        return push_to_peers(own, sends, peer_pool, self._pool.device)

    def attend_parts(
        self, own: EagerPlan, q: Tensor, width: int, attend: Callable[[AttentionPart, Tensor], Tensor]
    ) -> Tensor:
        """o [T, num_q_heads, width]; attend() gives a part's, of its tokens' q."""
        if own is not self._current:
            # FlashInfer copies its plan from pinned memory that the next plan overwrites.
            self._planned.synchronize()
            for part in own.parts:
                self._plan_part(part, q.shape[1], causal=own.causal)
            self._planned.record()
            self._current = own
        if len(own.parts) == 1 and own.parts[0].tokens is None:
            return attend(own.parts[0], q)
        output = q.new_empty((*q.shape[:2], width))
        for part in own.parts:
            assert part.tokens is not None  # of several parts, each has some
            output.index_copy_(0, part.tokens, attend(part, q.index_select(0, part.tokens)))
        return output

    @abstractmethod
    def _plan_part(self, part: AttentionPart, num_q_heads: int, *, causal: bool) -> None:
        """Plans the wrapper that computes the part."""
