"""Token trees: several guesses at how a sequence goes on, computed in one forward (SpecInfer; Miao et al., 2024).

Nodes are numbered as they are appended, a parent before its children; −1 is the parent of a root. Node j of a sequence
that held `base` positions is stored at position base + j, and rotated as position base + depth, which it would have if
its path were all there is. It sees the base, its ancestors and itself.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tandem.cache.errors import InvalidArgument
from tandem.cache.ragged import ragged_range
from tandem.cache.window import Int64Array

MAX_NODES = 256
MASK_WORDS = MAX_NODES // 32

Masks = NDArray[np.uint32]
"""[n, MASK_WORDS]: bit j % 32 of word j // 32 of a row says whether node j of its tree is seen."""


@dataclass(frozen=True, eq=False)
class TokenTrees:
    """The open trees of a forward's B sequences, and their new nodes.

    sequences: int64 [N], ascending, which of the B have one. sizes: int32 [N], nodes of each, those of earlier forwards
    included. tokens: int64 [n], where the new nodes of all trees stand among the T packed tokens, ascending. depths:
    int64 [n], theirs. masks: [n, MASK_WORDS], what they see of their trees.
    """

    sequences: Int64Array
    sizes: NDArray[np.int32]
    tokens: Int64Array
    depths: Int64Array
    masks: Masks


def extend_tree(parents: Int64Array, added: object, name: str) -> Int64Array:
    """`parents` and those of further nodes, indices over the whole tree; int64 [nodes].

    InvalidArgument, which calls them `name`, unless they are integers, −1 or of an earlier node, and at most MAX_NODES.
    """
    more = np.asarray(added)
    if more.ndim != 1 or more.dtype.kind not in "iu":
        raise InvalidArgument(f"{name} is {added!r}; one integer for each new node is accepted")
    total = parents.size + more.size
    if total > MAX_NODES:
        raise InvalidArgument(f"{name} makes a tree of {total} nodes; at most {MAX_NODES} are accepted")
    nodes = np.arange(parents.size, total)
    wrong = np.flatnonzero((more < -1) | (more >= nodes))
    if wrong.size:
        node = int(nodes[wrong[0]])
        raise InvalidArgument(
            f"{name} has {int(more[wrong[0]])} as parent of node {node}; -1 … {node - 1} are accepted"
        )
    return np.concatenate((parents, more.astype(np.int64)))


def path_to(parents: Int64Array, leaf: int) -> Int64Array:
    """int64: the nodes from a root to `leaf`; none for −1."""
    path = []
    while leaf >= 0:
        path.append(leaf)
        leaf = int(parents[leaf])
    return np.array(path[::-1], np.int64)


def visible_nodes(trees: list[Int64Array]) -> Masks:
    """What the nodes of some trees, given by their parents, see; one tree after another.

    By doubling: each node takes what its ancestor 1, 2, 4, … levels up sees, for all trees at once.
    """
    sizes = np.array([parents.size for parents in trees])
    begins = np.repeat(np.cumsum(sizes) - sizes, sizes)
    parents, total = np.concatenate(trees), int(sizes.sum())
    nodes = np.arange(total) - begins
    masks = np.zeros((total + 1, MASK_WORDS), np.uint32)  # the last row: no ancestor
    masks[np.arange(total), nodes // 32] = np.uint32(1) << (nodes % 32).astype(np.uint32)
    ancestors = np.append(np.where(parents < 0, total, parents + begins), total)
    while (ancestors < total).any():
        masks |= masks[ancestors]
        ancestors = ancestors[ancestors]
    return masks[:total]


def lay_out_trees(sequences: Int64Array, trees: list[Int64Array], qo_indptr: NDArray[np.int32]) -> TokenTrees:
    """sequences: see TokenTrees; trees: the parents of each, whose last nodes are the new tokens of qo_indptr."""
    sizes = np.array([parents.size for parents in trees])
    begins, appends = qo_indptr[sequences].astype(np.int64), np.diff(qo_indptr)[sequences].astype(np.int64)
    masks = visible_nodes(trees)[ragged_range(np.cumsum(sizes) - appends, appends)]
    depths = np.bitwise_count(masks).sum(1, dtype=np.int64) - 1
    return TokenTrees(sequences, sizes.astype(np.int32), ragged_range(begins, appends), depths, masks)


def unpack_masks(masks: Masks, num_nodes: int) -> NDArray[np.bool_]:
    """bool [n, num_nodes]."""
    octets = masks.astype("<u4", copy=False).view(np.uint8)
    return np.unpackbits(octets, axis=1, count=num_nodes, bitorder="little").view(np.bool_)
