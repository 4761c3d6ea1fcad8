"""Sequences that come, share pages with one another and with the prefix index, shrink and go."""

from collections.abc import Sequence

from tandem.cache.operations.growth import Growth
from tandem.cache.operations.open_trees import OpenTrees
from tandem.cache.operations.receptions import Receptions
from tandem.cache.operations.store import Store
from tandem.cache.plan.arrays import Int64Array, checked_reach, integer, integers
from tandem.cache.plan.errors import CacheError, InvalidArgument


class Sequences:
    """Owned by a PagedKVCache, whose parts it works on and whose docstrings say what its calls do."""

    def __init__(self, store: Store, receptions: Receptions, trees: OpenTrees, growth: Growth) -> None:
        self._table, self._pages, self._pools = store.table, store.pages, store.pools
        self._streams, self._marks, self._layout = store.streams, store.marks, store.layout
        self._max_length = store.max_length
        self._receptions = receptions
        self._trees = trees
        self._growth = growth

    def settled_row(self, sequence: int) -> int:
        """The row of a sequence that is not being received and has no open tree; else InvalidArgument."""
        self._receptions.check_settled(sequence)
        self._trees.check_closed(sequence)
        return self._table.row(sequence)

    def add(self, sequence: int) -> None:
        if integer("sequence", sequence) in self._receptions:
            raise InvalidArgument(f"sequence {sequence} still drains; finish_receive ends that")
        self._table.add(sequence)

    def remove(self, sequence: int) -> None:
        if sequence not in self._table:
            return
        row = self._table.row(sequence)
        self._pools.release(self._table.held_pages(row))
        self._marks.drop(row)
        self._trees.drop(sequence)
        self._table.remove(sequence)

    def fork(self, parent: int, child: int, position: int) -> None:
        integer("position", position)
        row, streams = self.settled_row(parent), self._table.streams
        window, sink = int(streams.windows[row]), int(streams.sinks[row])
        length = self._table.num_positions(row)
        at, most = (length if position == -1 else position), (min(sink, length) if window else length)
        if not 0 <= at <= most:
            raise InvalidArgument(f"position is {position}; -1 (all {length}) and 0 … {most} are accepted")
        self.add(child)
        try:
            self._pages.fork(row, self._table.row(child), at)
            if window:
                streams.enable(self._table.row(child), window, sink)
        except CacheError:
            self._table.remove(child)
            raise

    def pop(self, sequence: int, count: int) -> None:
        self._receptions.check_settled(sequence)
        row = self._table.row(sequence)
        length = int(self._table.lengths[row]) - integer("count", count)
        if count < 0 or length < 0:
            raise InvalidArgument(f"count is {count}; 0 … {length + count} are accepted")
        self._streams.check_cut(row, length)
        self._trees.pop(sequence, count)
        self._pages.cut(row, length)
        self._marks.rewind(row, self._table.num_positions(row))

    def reserve(self, sequence: int, num_tokens: int, longest_append: int | None) -> None:
        num_tokens, longest = checked_reach(num_tokens, longest_append)
        row = self._table.row(sequence)
        if self._table.streams.windows[row]:
            num_tokens = min(num_tokens, self._table.streams.longest(row, longest))
        self._growth.check_length(sequence, num_tokens)
        self._pages.reserve(row, num_tokens, longest)

    def enable_sliding_window(self, sequence: int, window: int, sink: int) -> None:
        row = self.settled_row(sequence)
        if self._layout.has_windows:
            raise InvalidArgument("the layout has groups with a window; sequences slide only in layouts without")
        if self._layout.has_latents:
            raise InvalidArgument("the layout has groups with latents; sequences slide only in layouts without")
        if self._table.num_positions(row):
            raise InvalidArgument(f"sequence {sequence} holds positions; only an empty one can begin to slide")
        if self._marks.any_open(row):  # the receiver of its position map would have to slide alike
            raise InvalidArgument(f"sequence {sequence} is marked to be sent; only one that is not can begin to slide")
        self._streams.check_window(window, sink, self._max_length)
        self._table.streams.enable(row, window, sink)

    def match_prefix(self, sequence: int, token_ids: Sequence[int] | Int64Array) -> int:
        self._check_sharing(sequence)
        row = self._table.row(sequence)
        if any(pages.size for pages in self._table.held_pages(row)):
            raise InvalidArgument(f"sequence {sequence} holds pages; only an empty one can take a prefix")
        tokens = integers("token_ids", token_ids)
        pages = self._pools.prefixes.match(tokens, max(tokens.size - 1, 0) // self._layout.page_size)
        self._pages.share(row, pages)
        return pages[0].size * self._layout.page_size

    def publish_prefix(self, sequence: int, token_ids: Sequence[int] | Int64Array) -> None:
        self._check_sharing(sequence)
        row = self.settled_row(sequence)
        length, tokens = int(self._table.lengths[row]), integers("token_ids", token_ids)
        if tokens.size > length:
            raise InvalidArgument(f"token_ids has {tokens.size} tokens; sequence {sequence} holds {length}")
        pages = self._table.held_pages(row, 0, tokens.size // self._layout.page_size)
        self._pools.prefixes.publish(tokens, pages)

    def _check_sharing(self, sequence: int) -> None:
        if self._table.streams.windows[self._table.row(sequence)]:
            raise InvalidArgument(f"sequence {sequence} slides; only sequences that do not share prefixes")
        if self._layout.has_windows:
            raise InvalidArgument("the layout has groups with a window; prefixes are shared only in layouts without")
