"""Plans whose append also stores into mapped pools of peers."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch

from tandem.cache.kernels.base import PeerPool
from tandem.cache.kernels.peer_rows import peer_rows
from tandem.cache.kernels.triton.append import AppendTargets
from tandem.cache.kernels.upload import upload
from tandem.cache.plan.tables import Send


@dataclass(frozen=True, eq=False)
class AppendPlan:
    """keep: whether append returns what it stored, for a writer that takes it from there."""

    targets: AppendTargets
    keep: bool = field(default=False, kw_only=True)


PlanT = TypeVar("PlanT", bound=AppendPlan)


def push_to_peers(
    own: PlanT, sends: Sequence[Send], peer_pool: PeerPool, device: torch.device
) -> tuple[PlanT, tuple[Send, ...]]:
    """See AttentionBackend.push_with_append; one launch writes to all peers."""
    addresses, left = peer_rows(own.targets.slots.shape[0], sends, peer_pool)
    rows = upload([addresses], device)[0] if addresses.any() else None
    keep = any(send.token_indices.shape[0] for send in left)
    return replace(own, targets=replace(own.targets, peer_rows=rows), keep=keep), tuple(left)
