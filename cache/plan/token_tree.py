"""Token trees: several guesses at how a sequence goes on, computed in one forward (SpecInfer; Miao et al., 2024).

Nodes are numbered as they are appended, a parent before its children; −1 is the parent of a root. Node j of a sequence
that held `base` positions is stored at position base + j, and rotated as position base + depth: its position if the
tree were only its path. It sees the base, its ancestors and itself; with a window of w, the last w of these positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tandem.cache.plan.arrays import Int64Array, ragged_range
from tandem.cache.plan.errors import InvalidArgument

MAX_NODES = 256
MASK_WORDS = MAX_NODES // 32

Masks = NDArray[np.uint32]
"""[n, MASK_WORDS]: bit j % 32 of word j // 32 of a row says whether node j of its tree is seen."""


@dataclass(frozen=True, eq=False)
class TokenTrees:
    """The open trees of a forward's B sequences, and their new nodes.

    sequences: int64 [N], ascending, the sequences with a tree. parents: for each tree its nodes' parents, int64
    [nodes], earlier forwards included. sizes: int32 [N], nodes of each. counts: int64 [N], new nodes of each. tokens:
    int64 [n], where the new nodes of all trees stand among the T packed tokens, ascending. depths: int64 [n], theirs.
    masks: [n, MASK_WORDS], what they see of their trees.
    """

    sequences: Int64Array
    parents: tuple[Int64Array, ...]
    sizes: NDArray[np.int32]
    counts: Int64Array
    tokens: Int64Array
    depths: Int64Array
    masks: Masks

    def masks_in(self, window: int | None) -> Masks:
        """Returns the masks in layers with this window."""
        if window is None or int(self.depths.max()) < window:
            return self.masks
        return visible_nodes(self.parents, window)[_new_nodes(self.sizes, self.counts)]


def extend_tree(parents: Int64Array, more: Int64Array, name: str) -> Int64Array:
    """Returns `parents` with the parents of further nodes, as indices over the whole tree, int64 [nodes].

    InvalidArgument, which calls them `name`, unless they are −1 or of an earlier node, and at most MAX_NODES.
    """
    total = parents.size + more.size
    if total > MAX_NODES:
        raise InvalidArgument(f"{name} makes a tree of {total} nodes; it may have at most {MAX_NODES}")
    nodes = np.arange(parents.size, total)
    wrong = np.flatnonzero((more < -1) | (more >= nodes))
    if wrong.size:
        node = int(nodes[wrong[0]])
        raise InvalidArgument(
            f"{name} has {int(more[wrong[0]])} as parent of node {node}; it must be from -1 to {node - 1}"
        )
    return np.concatenate((parents, more))


def path_to(parents: Int64Array, leaf: int) -> Int64Array:
    """Returns the nodes from a root to `leaf`, int64; none for −1."""
    path = []
    while leaf >= 0:
        path.append(leaf)
        leaf = int(parents[leaf])
    return np.array(path[::-1], np.int64)


def visible_nodes(trees: Sequence[Int64Array], window: int | None = None) -> Masks:
    """Returns the nodes that each node of some trees, given by their parents, sees; one tree after another.

    Works by doubling: each node takes what its ancestor 1, 2, 4, … levels up sees, for all trees at once. A window
    takes away what the ancestor that is `window` levels up sees.
    """
    sizes = np.array([parents.size for parents in trees])
    begins = np.repeat(np.cumsum(sizes) - sizes, sizes)
    parents, total = np.concatenate(trees), int(sizes.sum())
    nodes = np.arange(total) - begins
    masks = np.zeros((total + 1, MASK_WORDS), np.uint32)  # the last row: no ancestor
    masks[np.arange(total), nodes // 32] = np.uint32(1) << (nodes % 32).astype(np.uint32)
    ancestors = np.append(np.where(parents < 0, total, parents + begins), total)
    outside, levels = np.arange(total + 1), 0 if window is None else window
    while (ancestors < total).any():
        masks |= masks[ancestors]
        if levels & 1:
            outside = ancestors[outside]
        ancestors, levels = ancestors[ancestors], levels >> 1
    if window is None or levels:  # so far up there are none
        return masks[:total]
    return masks[:total] & ~masks[outside[:total]]


def lay_out_trees(sequences: Int64Array, trees: Sequence[Int64Array], qo_indptr: NDArray[np.int32]) -> TokenTrees:
    """sequences: see TokenTrees; trees: the parents of each, whose last nodes are the new tokens of qo_indptr."""
    sizes = np.array([parents.size for parents in trees], np.int32)
    begins, appends = qo_indptr[sequences].astype(np.int64), np.diff(qo_indptr)[sequences].astype(np.int64)
    masks = visible_nodes(trees)[_new_nodes(sizes, appends)]
    depths = np.bitwise_count(masks).sum(1, dtype=np.int64) - 1
    return TokenTrees(sequences, tuple(trees), sizes, appends, ragged_range(begins, appends), depths, masks)


def _new_nodes(sizes: NDArray[np.int32], counts: Int64Array) -> Int64Array:
    """Returns the indices, among all trees' nodes, of the last counts[i] of each tree's sizes[i] nodes, int64."""
    return ragged_range(np.cumsum(sizes) - counts, counts)


def unpack_masks(masks: Masks, num_nodes: int) -> NDArray[np.bool_]:
    """Unpacks masks to bool [n, num_nodes]."""
    octets = masks.astype("<u4", copy=False).view(np.uint8)
    return np.unpackbits(octets, axis=1, count=num_nodes, bitorder="little").view(np.bool_)
