"""The parts of one cache, which its three faces (sequences, forwards, transfers) share."""

from collections.abc import Sequence

from torch import Tensor

from tandem.cache.attention.forward import LayerIndex
from tandem.cache.attention.layer_groups import heads_of_groups, make_groups
from tandem.cache.attention.rotations import Rotations
from tandem.cache.attention.sliding_sequences import SlidingSequences
from tandem.cache.kernels.base import KernelFactory
from tandem.cache.kernels.choice import choose_kernels
from tandem.cache.kinds.heads import Heads
from tandem.cache.operations.copy_fences import CopyFences
from tandem.cache.operations.growth import Growth
from tandem.cache.operations.open_trees import OpenTrees
from tandem.cache.operations.receptions import Receptions
from tandem.cache.pages.page_pools import PagePools
from tandem.cache.pages.send_marks import SendMarks
from tandem.cache.pages.sequence_pages import SequencePages
from tandem.cache.pages.sequence_table import SequenceTable, Standing
from tandem.cache.plan.arrays import Int64Array, integer
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.latent import LatentHeads
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.page_writer import PageWriter
from tandem.cache.plan.pool_sizes import NO_SNAPSHOTS, SnapshotRule
from tandem.cache.plan.rope import RopeParameters
from tandem.cache.store.parked_store import ParkedStore

Ids = Sequence[int] | Int64Array


class Parts:
    """The parts of a PagedKVCache."""

    def __init__(
        self,
        layout: KVLayout,
        pools: Sequence[Tensor],
        *,
        max_sequences: int,
        max_sequence_length: int,
        rope: RopeParameters | Sequence[RopeParameters],
        writer: PageWriter | None,
        scale: float | None = None,
        softcap: float | None = None,
        latent: LatentHeads | None = None,
        heads: Sequence[Heads] | None = None,
        kernels: KernelFactory = choose_kernels,
        snapshots: SnapshotRule = NO_SNAPSHOTS,
    ) -> None:
        """pools: per layer group `[num_pages, *layout.page_shape(group)]`, contiguous, the caller's; what they hold at
        first does not matter. rope: one for all groups, or one for each. writer: None when nothing is sent.

        scale: of the softmax; None: q's width ** -0.5. softcap: scores become softcap · tanh(score / softcap), not with
        latents. latent: the heads that read latents. heads: these three values for each group, in place of them.
        snapshots: of recurrent states, by which prefixes are shared.
        """
        layout.check_pools(pools)
        integer("max_sequence_length", max_sequence_length, least=1)
        if integer("every of snapshots", snapshots.every, least=1) % layout.page_size and snapshots.most:
            raise InvalidArgument(
                f"every of snapshots is {snapshots.every}; it must be a multiple of page_size, {layout.page_size}"
            )
        self.layout, self.max_sequence_length, self._layers = layout, max_sequence_length, LayerIndex.of(layout)
        self._writer = writer
        spans = [group.keeps for group in layout.groups]
        num_pages = tuple(
            pool.shape[0] - span.last * snapshots.drafted for pool, span in zip(pools, spans, strict=True)
        )
        self._pools = PagePools(num_pages, layout.page_size, spans, layout.pages_together)
        self._table = SequenceTable(layout.paging, max_sequences, max_sequence_length, layout.page_size)
        self._marks = SendMarks([span.every for span in spans], max_sequences)
        self._rotations = Rotations(rope, layout, max_sequence_length, pools[0].device)
        self._sliding = SlidingSequences(self._table, self._rotations, spans)
        if heads is None:
            heads = heads_of_groups(Heads(scale, softcap, latent), layout)
        encoder_lens = self._table.encoder_lens if layout.has_encoder else None
        self._groups = make_groups(layout, pools, self._table.groups, writer, heads, kernels, encoder_lens)
        self._pages = SequencePages(
            layout, self._table, self._pools, [group.backend for group in self._groups], snapshots
        )
        self._receptions = Receptions(self._table, self._pages, self._pools, self._sliding, pools)
        self._trees = OpenTrees(self._table, self._pages, self._marks, self._groups)
        self._growth = Growth(self._table, self._pages, self._sliding, self._marks, self._receptions, self._trees)
        self._fences = CopyFences(layout, self._table, self._pools)
        self._parked: ParkedStore | None = None
        self._launched: Standing | None = None
        """The sequences of the last forward. None where it took no note of its layers."""

    def _settled_row(self, sequence: int) -> int:
        """The row of a sequence that is not being received and has no open tree; else InvalidArgument."""
        self._receptions.check_settled(sequence)
        self._trees.check_closed(sequence)
        return self._table.row(sequence)
