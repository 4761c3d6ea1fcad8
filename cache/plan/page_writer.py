"""The port through which the cache writes into pages of another worker; tandem.transfer's transports implement it."""

from typing import Protocol

from torch import Tensor

from tandem.cache.plan.arrays import Int32Array
from tandem.cache.plan.stored_layers import Stages


class PageWriter(Protocol):
    """One-sided writes into the pools of peers. Writes may land late and in any order; a transport's fence tells when.

    Slots are int32, page_id · page_size + offset; group counts the layout's layer groups, layer counts within it.
    """

    def write_tokens(
        self, pe: int, group: int, layer: int, k: Tensor, v: Tensor | None, token_indices: Tensor, slots: Tensor
    ) -> None:
        """Rows token_indices (int64 [n]) of k and v ([num_tokens, num_kv_heads, head_dim]) to the peer's slots [n].

        v is None for a group whose entries are one plane, see LayerGroup; k then is the entry.
        token_indices and slots are on the host.
        """
        ...

    def write_slots(
        self, pe: int, group: int, source_slots: Int32Array, target_slots: Int32Array, stages: Stages = ()
    ) -> None:
        """All layers of the own source_slots (int32 [n]), once what was launched so far is done, to the peer's
        target_slots (int32 [n]).

        stages: when layers of the source are stored, where that is known; a writer may send them as soon.
        """
        ...

    def peer_pool(self, pe: int, group: int) -> Tensor | None:
        """The peer's pool where kernels of this process can store into it; None where they cannot. Raises for a PE that
        is not there.

        Such stores, on the current stream, are covered by fences as writes are.
        """
        ...
