"""The token trees that sequences of a cache have open: how they grow, and what is kept of them in the end."""

from collections.abc import Sequence

import numpy as np

from tandem.cache.attention.forward import Parents
from tandem.cache.attention.layer_groups import LayerGroups
from tandem.cache.pages.send_marks import SendMarks
from tandem.cache.pages.sequence_pages import SequencePages
from tandem.cache.pages.sequence_table import SequenceTable
from tandem.cache.plan.arrays import Int64Array, integers
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.tables import slots_of
from tandem.cache.plan.token_tree import TokenTrees, extend_tree, lay_out_trees, path_to

NO_NODES = np.empty(0, np.int64)


class OpenTrees:
    """The open token trees: for each sequence the parents of its nodes, which are its last positions. See PagedKVCache
    for what calls do."""

    def __init__(self, table: SequenceTable, pages: SequencePages, marks: SendMarks, groups: LayerGroups) -> None:
        self._table, self._pages, self._marks = table, pages, marks
        self._backends = [group.backend for group in groups]
        self._chunks = [group.chunk for group in groups]
        self._every = [group.table.every for group in groups]
        self._parents: dict[int, Int64Array] = {}

    @property
    def any_open(self) -> bool:
        return bool(self._parents)

    def is_open(self, sequence: int) -> bool:
        """Whether a sequence has an open tree."""
        return sequence in self._parents

    def check_closed(self, sequence: int) -> None:
        """InvalidArgument while a sequence has an open tree."""
        if sequence in self._parents:
            raise InvalidArgument(
                f"sequence {sequence} has an open token tree of {self._parents[sequence].size} nodes; "
                "commit_token_tree ends that"
            )

    def extended(
        self, seq_ids: tuple[int, ...], appends: Int64Array, parents: Sequence[Parents | None] | None
    ) -> dict[int, Int64Array]:
        """Returns the trees of the sequences with parents[i], with the new nodes. Nothing is changed yet.

        InvalidArgument where a tree cannot be, or where one is open and parents has none for it.
        """
        if parents is None and not self._parents:
            return {}
        try:
            given = [None] * len(seq_ids) if parents is None else list(parents)
        except TypeError:
            raise InvalidArgument(
                f"token_tree_parents is {parents!r}; it must have an entry for each sequence"
            ) from None
        if len(given) != len(seq_ids):
            raise InvalidArgument(f"token_tree_parents has {len(given)} entries; seq_ids has {len(seq_ids)}")
        trees: dict[int, Int64Array] = {}
        for index, (sequence, added) in enumerate(zip(seq_ids, given, strict=True)):
            if added is None:
                self.check_closed(sequence)
                continue
            name = f"token_tree_parents[{index}]"
            nodes = integers(name, added)
            if nodes.size != int(appends[index]):
                raise InvalidArgument(f"{name} has {nodes.size} entries; append_lengths[{index}] is {appends[index]}")
            self._check_can_open(sequence)
            tree = self._parents.get(sequence, NO_NODES)
            trees[sequence] = extend_tree(tree, nodes, name)
            base = int(self._table.lengths[self._table.row(sequence)]) - tree.size
            self._check_chunks(name, base, trees[sequence].size)
        return trees

    def bases(self, seq_ids: tuple[int, ...], lengths: Int64Array) -> Int64Array:
        """Returns how many of the sequences' `lengths` positions come before their open trees, int64 [B]."""
        trees = (self._parents.get(sequence, NO_NODES) for sequence in seq_ids)
        return lengths - np.fromiter((tree.size for tree in trees), np.int64, lengths.size)

    def put(self, trees: dict[int, Int64Array], seq_ids: tuple[int, ...], qo_indptr: np.ndarray) -> TokenTrees:
        """Opens or extends these trees, at least one. Returns how their new nodes are laid out in the forward of
        seq_ids."""
        self._parents.update(trees)
        there = np.array([index for index, sequence in enumerate(seq_ids) if sequence in trees])
        return lay_out_trees(there, [trees[seq_ids[index]] for index in there], qo_indptr)

    def pop(self, sequence: int, count: int) -> None:
        """The last `count` positions are taken back: of an open tree the last nodes. InvalidArgument beyond those."""
        tree = self._parents.get(sequence)
        if tree is None:
            return
        if count > tree.size:
            raise InvalidArgument(
                f"counts has {count}; the open token tree of sequence {sequence} has {tree.size} nodes"
            )
        self._parents[sequence] = tree[: tree.size - count]
        if count == tree.size:
            del self._parents[sequence]

    def drop(self, sequence: int) -> None:
        self._parents.pop(sequence, None)

    def commit(self, seq_ids: tuple[int, ...], leaf_indices: Sequence[int] | Int64Array) -> None:
        rows = self._table.rows(seq_ids)
        leaves = integers("leaf_indices", leaf_indices)
        if leaves.shape != rows.shape:
            raise InvalidArgument(f"leaf_indices has shape {leaves.shape}; it must be [B], B = {rows.size}")
        paths = [path_to(*self._leaf(sequence, leaf)) for sequence, leaf in zip(seq_ids, leaves.tolist(), strict=True)]
        bases = self.bases(seq_ids, self._table.lengths[rows])
        self._compact(rows, bases, paths)
        for sequence, row, base, path in zip(seq_ids, rows, bases, paths, strict=True):
            del self._parents[sequence]
            self._pages.cut(int(row), int(base) + path.size)

    def _check_chunks(self, name: str, base: int, num_nodes: int) -> None:
        """A node is stored after those before it, wherever in the text it stands: all have to see one chunk, and what
        an entry for several positions would hold is not known before the commit."""
        for group, chunk in enumerate(self._chunks):
            room = num_nodes if chunk is None else chunk - base % chunk
            if num_nodes > room:
                raise InvalidArgument(
                    f"{name} makes a tree of {num_nodes} nodes behind {base} positions; layer group {group} keeps "
                    f"chunks of {chunk}, so the tree may have at most {room} nodes"
                )
        for group, every in enumerate(self._every):
            if (base + num_nodes) // every > base // every and every > 1:
                raise InvalidArgument(
                    f"{name} makes a tree of {num_nodes} nodes behind {base} positions; layer group {group} keeps an "
                    f"entry for {every} positions, which no node may complete, so the tree may have at most "
                    f"{every - 1 - base % every} nodes"
                )

    def _leaf(self, sequence: int, leaf: int) -> tuple[Int64Array, int]:
        tree = self._parents.get(sequence)
        if tree is None:
            raise InvalidArgument(
                f"sequence {sequence} has no open token tree; token_tree_parents of a batch opens one"
            )
        if not -1 <= leaf < tree.size:
            raise InvalidArgument(
                f"leaf_indices has {leaf} for sequence {sequence}; it must be from -1 to {tree.size - 1}"
            )
        return tree, leaf

    def _compact(self, rows: Int64Array, bases: Int64Array, paths: list[Int64Array]) -> None:
        """Moves the nodes of each path to the first positions after the base; a node never moves up."""
        for backend, group in zip(self._backends, self._table.groups, strict=True):
            if group.every > 1:  # no node has an entry there
                continue
            sources, targets = [], []
            for row, base, path in zip(rows, bases, paths, strict=True):
                nodes = np.arange(path.size)
                moved = path != nodes
                sources.append(slots_of(group.pages, row, base + path[moved], self._table.page_size))
                targets.append(slots_of(group.pages, row, base + nodes[moved], self._table.page_size))
            if sum(slots.size for slots in sources):
                backend.move_slots(np.concatenate(sources), np.concatenate(targets))

    def _check_can_open(self, sequence: int) -> None:
        for index, backend in enumerate(self._backends):
            if not backend.capabilities.trees:
                raise InvalidArgument(
                    f"token_tree_parents is given; {type(backend).__name__}, the backend of layer group {index}, "
                    "takes no token trees"
                )
        if self._table.sliding.windows[self._table.row(sequence)]:
            raise InvalidArgument(f"sequence {sequence} slides; only sequences that do not take token trees")
        if self._marks.any_open(self._table.row(sequence)):
            raise InvalidArgument(
                f"sequence {sequence} is being sent; token trees can be opened when its position map is used up"
            )
