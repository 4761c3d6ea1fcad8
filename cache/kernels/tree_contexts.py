"""The positions before a token tree that its new nodes see. With a window, deeper nodes see fewer."""

from dataclasses import dataclass

import numpy as np

from tandem.cache.plan.arrays import Int32Array, Int64Array
from tandem.cache.plan.spans import span_of
from tandem.cache.plan.tables import PageTables
from tandem.cache.plan.token_tree import TokenTrees


@dataclass(frozen=True, eq=False)
class TreeContexts:
    """The contexts of N trees with n new nodes. Positions count within the sequence's tables. int64 [N] each:

            firsts                commons             bases
        ────┤ seen by some nodes  ├ seen by all nodes ├ the tree

    commons are bases, or where a page begins. edges: int32 [n], how many positions between firsts and commons a node
    does not see, from firsts on.
    """

    firsts: Int64Array
    commons: Int64Array
    bases: Int64Array
    edges: Int32Array


def split_contexts(trees: TokenTrees, tables: PageTables, page_size: int, window: int | None) -> TreeContexts:
    """trees: of the sequences of tables. window: of the layers that use these tables."""
    first_needed = span_of(window).first_needed
    bases = (tables.kv_lens[trees.sequences] - trees.sizes).astype(np.int64)
    begins = np.cumsum(trees.counts) - trees.counts
    firsts = np.minimum(first_needed(bases + np.minimum.reduceat(trees.depths, begins)), bases)
    commons = first_needed(bases + np.maximum.reduceat(trees.depths, begins))
    commons = np.minimum(-(-commons // page_size) * page_size, bases)
    edges = first_needed(np.repeat(bases, trees.counts) + trees.depths) - np.repeat(firsts, trees.counts)
    return TreeContexts(firsts, commons, bases, edges.astype(np.int32))
