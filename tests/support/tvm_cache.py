"""A cache with the calls of TVM's PagedAttentionKVCache, and questions that only tests ask."""

from collections.abc import Sequence

from torch import Tensor

from tandem.cache.attention.begun_forward import Forward
from tandem.cache.attention.forward import Batch, Parents
from tandem.cache.kernels.base import Compression, Index, Part
from tandem.cache.operations.parts import Ids
from tandem.cache.paged_cache import PagedKVCache
from tandem.cache.plan.latent import UpProjections
from tandem.cache.plan.tables import TokenLayout


class TvmCache(PagedKVCache):
    """Calls of a forward come to Attention, whose docstrings have their contracts."""

    @classmethod
    def of(cls, cache: PagedKVCache) -> "TvmCache":
        """Returns the same cache with these calls."""
        same = cls.__new__(cls)
        same.__dict__ = cache.__dict__
        return same

    def begin_forward(
        self,
        seq_ids: Ids,
        append_lengths: Ids,
        rope_lengths: Ids | None = None,
        token_tree_parents: Sequence[Parents | None] | None = None,
        *,
        push: bool = True,
    ) -> Forward:
        return self.begin(Batch(seq_ids, append_lengths, rope_lengths, token_tree_parents, push))

    def end_forward(self, plan: Forward) -> None:
        self.commit(plan)

    def attention(
        self, plan: Forward, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        self._check_owner(plan)
        return plan.attention.attend(layer, q, k, v, sinks)

    def read(self, plan: Forward, layer: int, q: Tensor, sinks: Tensor | None = None) -> Tensor:
        self._check_owner(plan)
        return plan.attention.read(layer, q, sinks)

    def read_part(self, plan: Forward, layer: int, q: Tensor, *, causal: bool = True) -> Part:
        self._check_owner(plan)
        return plan.attention.read_part(layer, q, causal=causal)

    def latent_attention(
        self,
        plan: Forward,
        layer: int,
        q: Tensor,
        latents: Tensor,
        keys: Tensor,
        up: UpProjections,
        choice: Index | None = None,
    ) -> Tensor:
        self._check_owner(plan)
        return plan.attention.attend_latents(layer, q, latents, keys, up, choice)

    def shared_attention(
        self,
        plan: Forward,
        layer: int,
        q: Tensor,
        kv: Tensor,
        sinks: Tensor,
        compression: Compression | None = None,
    ) -> Tensor:
        self._check_owner(plan)
        return plan.attention.attend_shared(layer, q, kv, sinks, compression)

    def new_entries(self, plan: Forward, group: int) -> TokenLayout:
        self._check_owner(plan)
        return plan.attention.new_entries(group)

    def store(self, plan: Forward, group: int, layer: int, k: Tensor, v: Tensor | None = None) -> None:
        self._check_owner(plan)
        plan.attention.store(group, layer, k, v)

    def encode(self, seq_ids: Ids, *, push: bool = True) -> Forward:
        return self.begin(Batch(seq_ids, push=push, encodes=True))

    def pop(self, sequence: int, count: int) -> None:
        self.pop_each([sequence], [count])

    # What only tests ask

    def num_tokens(self, sequence: int) -> int:
        return self.sequence(sequence).num_tokens

    def border(self, sequence: int) -> int:
        return self.sequence(sequence).border

    def bytes_sent(self, sequence: int) -> int:
        return self.sequence(sequence).bytes_sent

    @property
    def num_pages(self) -> int:
        return self.pages.total

    @property
    def num_free_pages(self) -> int:
        return self.pages.free

    @property
    def num_cached_pages(self) -> int:
        return self.pages.cached

    @property
    def num_draining_pages(self) -> int:
        return self.pages.draining

    def clear(self) -> None:
        """Removes all sequences and prefixes; pages that drain go on doing so."""
        for sequence in self._table.sequences():
            self.remove_sequence(sequence)
        self.clear_prefixes()

    def clear_prefixes(self) -> None:
        """Forgets all prefixes; pages that sequences use stay theirs."""
        self._pools.prefixes.clear()

    @property
    def is_empty(self) -> bool:
        """Returns whether there is no sequence; pages may still drain or hold prefixes."""
        return len(self._table) == 0

    def first_position(self, sequence: int) -> int:
        """Returns the first position that all layers hold: 0 without windows."""
        return max(self._pages.first_positions(self._table.row(sequence)))

    def gather_kv(self, sequence: int, begin: int, end: int) -> list[tuple[Tensor, Tensor]]:
        """Returns gather_group() of each layer of the model. begin is at least first_position(sequence), unless nothing
        is asked for."""
        places = self._layers.places.values()
        found = {group: self.gather_group(sequence, group, begin, end) for group in {group for group, _ in places}}
        return [found[group][index] for group, index in places]

    def num_sent(self, sequence: int) -> int:
        """Returns how many positions of its map forwards have issued; fewer after pop."""
        return self._marks.num_sent(self._table.row(sequence))

    def sends_done(self, sequence: int) -> bool:
        """Returns whether all of the sequence's map has been issued; True without a map."""
        return not self._marks.any_open(self._table.row(sequence))
