"""What the parts of one cache work on together."""

from dataclasses import dataclass

from tandem.cache.attention.layer_groups import LayerGroups
from tandem.cache.attention.sliding_sequences import SlidingSequences
from tandem.cache.pages.page_pools import PagePools
from tandem.cache.pages.send_marks import SendMarks
from tandem.cache.pages.sequence_pages import SequencePages
from tandem.cache.pages.sequence_table import SequenceTable
from tandem.cache.plan.layout import KVLayout


@dataclass(frozen=True, eq=False)
class Store:
    """Owned by a PagedKVCache. pages is what moves pages between pools and table; max_length: positions of a sequence
    at most."""

    layout: KVLayout
    max_length: int
    pools: PagePools
    table: SequenceTable
    marks: SendMarks
    sliding: SlidingSequences
    groups: LayerGroups
    pages: SequencePages
