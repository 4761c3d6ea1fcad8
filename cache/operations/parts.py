"""The parts of one cache, which its three faces (sequences, forwards, transfers) share."""

from collections.abc import Sequence

from torch import Tensor

from tandem.cache.attention.layer_groups import Heads, make_groups, make_pages
from tandem.cache.attention.rotations import Rotations
from tandem.cache.attention.sliding_sequences import SlidingSequences
from tandem.cache.kernels.base import KernelFactory
from tandem.cache.operations.growth import Growth
from tandem.cache.operations.open_trees import OpenTrees
from tandem.cache.operations.receptions import Receptions
from tandem.cache.operations.store import Store
from tandem.cache.operations.transmissions import Transmissions
from tandem.cache.pages.page_pools import PagePools
from tandem.cache.pages.send_marks import SendMarks
from tandem.cache.pages.sequence_table import SequenceTable
from tandem.cache.plan.arrays import integer
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.page_writer import PageWriter
from tandem.cache.plan.rope import RopeParameters


class Parts:
    """See PagedKVCache for the arguments."""

    def __init__(
        self,
        layout: KVLayout,
        pools: Sequence[Tensor],
        heads: Heads,
        kernels: KernelFactory,
        *,
        max_sequences: int,
        max_sequence_length: int,
        rope: RopeParameters | Sequence[RopeParameters],
        writer: PageWriter | None,
    ) -> None:
        layout.check_pools(pools)
        integer("max_sequence_length", max_sequence_length, least=1)
        self.layout, self.max_sequence_length, self._layers = layout, max_sequence_length, layout.layer_index
        self._pools = PagePools(tuple(pool.shape[0] for pool in pools), layout.page_size)
        self._table = SequenceTable(len(pools), max_sequences, max_sequence_length, layout.page_size)
        self._marks = SendMarks(len(pools), max_sequences)
        self._rotations = Rotations(rope, layout, max_sequence_length, pools[0].device)
        self._sliding = SlidingSequences(self._table, self._rotations, layout.page_size)
        self._groups = make_groups(layout, pools, self._table.groups, writer, heads, kernels)
        self._pages = make_pages(layout, self._table, self._pools, self._groups)
        parts = self._pools, self._table, self._marks, self._sliding, self._groups, self._pages
        store = Store(layout, max_sequence_length, *parts)
        self._receptions = Receptions(store, pools)
        self._trees = OpenTrees(store)
        self._growth = Growth(store, self._receptions, self._trees)
        self._transmissions = Transmissions(store, self._trees, writer)

    def _settled_row(self, sequence: int) -> int:
        """The row of a sequence that is not being received and has no open tree; else InvalidArgument."""
        self._receptions.check_settled(sequence)
        self._trees.check_closed(sequence)
        return self._table.row(sequence)
