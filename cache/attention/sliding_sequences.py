"""Sequences with a sliding window in a forward: evicting before it, undoing that when it cannot be, planning it."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
from torch import Tensor

from tandem.cache.attention.page_look_up import PageLookUp
from tandem.cache.attention.rotations import Rotations
from tandem.cache.kernels.torch.sliding import SlidingPart, SlidingParts, SlidingRows, plan_sliding_part
from tandem.cache.kernels.upload import upload
from tandem.cache.pages.page_pools import PageIds
from tandem.cache.pages.send_marks import SendMarks
from tandem.cache.pages.sequence_table import SequenceTable
from tandem.cache.pages.sliding_table import Slides
from tandem.cache.plan.arrays import Int64Array, integer
from tandem.cache.plan.errors import CacheError, InvalidArgument
from tandem.cache.plan.position_map import SKIP, PositionMap
from tandem.cache.plan.rope import Rotation
from tandem.cache.plan.spans import Span
from tandem.cache.plan.tables import TokenLayout


class SlidingSequences:
    """Makes rows of `table` slide. SlidingTable describes how they are stored."""

    def __init__(self, table: SequenceTable, rotations: Rotations, spans: Sequence[Span]) -> None:
        """spans: of the layer groups. They count positions of the text, whatever has been evicted."""
        self._table = table
        self._spans = spans
        self._rotations = rotations
        self._look_ups = [PageLookUp(group) for group in table.groups]
        self._nothing: PageIds = tuple(np.empty(0, np.int32) for _ in table.groups)
        self._unslid = nullcontext(self._nothing)
        self._no_parts: list[SlidingParts | None] = [None] * len(table.groups)

    def check_window(self, window: int, sink: int, max_length: int) -> None:
        most = max_length - 2 * self._table.page_size + 1
        if not 1 <= integer("window", window) <= most:
            raise InvalidArgument(f"window is {window}; it must be from 1 to {most}")
        if not 0 <= integer("sink", sink) < window:
            raise InvalidArgument(f"sink is {sink}; it must be from 0 to {window - 1}, less than the window")
        if self._rotations.by_length:
            raise InvalidArgument(
                "RoPE is dynamic or longrope, by the length of a sequence; those with a sliding window need another"
            )

    def check_rotated(self, window: int, sink: int, length: int) -> None:
        """InvalidArgument unless a sequence can slide whose first `length` positions are rotated. q is rotated
        relative to such a position as long as it stays, and rotations are known up to the longest sequence."""
        most = self._rotations.max_positions - (window - sink)
        if length > max(sink, most):
            raise InvalidArgument(
                f"{length} positions are rotated before the sequence slides by a window of {window} behind {sink}; at "
                f"most {max(sink, most)} are allowed"
            )

    def check_reach(self, seq_ids: Sequence[int], rows: Int64Array, new_lengths: Int64Array) -> None:
        """InvalidArgument where rows that slid grow to new_lengths (int64 [B]) further than rotations are known, while
        K is there that is stored rotated and has moved: q meets it as it is rotated by its position."""
        table = self._table.sliding
        if table.count == 0:
            return
        gone, sinks = table.dropped[rows] + table.holes[rows], table.sinks[rows]
        late = (table.windows[rows] > 0) & (gone > 0) & (table.rotated[rows] > sinks + gone)
        beyond = (late & (new_lengths + table.dropped[rows] > self._rotations.max_positions)).nonzero()[0]
        if beyond.size:
            first = int(beyond[0])
            raise InvalidArgument(
                f"sequence {seq_ids[first]} would have {new_lengths[first] + table.dropped[rows[first]]} positions; "
                f"it may have at most {self._rotations.max_positions} before K that was rotated by its position has "
                "left"
            )

    def slid(
        self, rows: Int64Array, appends: Int64Array, *, receive: bool = False, in_flight: bool = False
    ) -> AbstractContextManager[PageIds]:
        """Evicts what rows (distinct) drop before `appends` more, see SlidingTable.plan_slides; undone when the
        caller's block raises.

        Gives per group the pages that are gone, for the caller to release.
        """
        sliding_table = self._table.sliding
        slides = None
        if sliding_table.count:
            lengths = self._table.lengths[rows]
            slides = sliding_table.plan_slides(rows, lengths, appends, receive=receive, in_flight=in_flight)
        return self._unslid if slides is None else self._sliding(slides)

    @contextmanager
    def _sliding(self, slides: Slides) -> Iterator[PageIds]:
        table, moved = self._table, slides.moved
        of_groups = [(array, moved) for group in table.groups for array in (group.begins, group.ends, group.pages)]
        changing: list[tuple[np.ndarray, Int64Array]] = [
            (table.sliding.holes, slides.rows),
            (table.lengths, moved),
            (table.sliding.dropped, moved),
            *(of_groups if moved.size else ()),
        ]
        before = [array[rows] for array, rows in changing]
        try:
            yield self._apply(slides)
        except CacheError:
            for (array, rows), values in zip(changing, before, strict=True):
                array[rows] = values
            raise

    def check_unsent(self, seq_ids: Sequence[int], rows: Int64Array, appends: Int64Array, marks: SendMarks) -> None:
        """A sliding sequence evicts before anything is sent, for all that it appends: not what its map asks for."""
        sliding_table = self._table.sliding
        if sliding_table.count == 0 or marks.count == 0:
            return
        ends = marks.ends[rows]
        sending = (marks.planned[rows] < ends) & (sliding_table.windows[rows] > 0)
        if not np.count_nonzero(sending):
            return
        lengths = self._table.lengths[rows] + sliding_table.dropped[rows]
        unsent = sending & (marks.planned[rows] < lengths)
        beyond = (unsent & (lengths + appends > ends)).nonzero()[0]
        if beyond.size:
            first = int(beyond[0])
            raise InvalidArgument(
                f"append_lengths[{first}] is {appends[first]}; sequence {seq_ids[first]} slides and is to send what "
                f"it holds: it must be at most {ends[first] - lengths[first]}, up to the end of its position map"
            )

    def plan(
        self, rows: Int64Array, tokens: TokenLayout, rope_lengths: Int64Array | None
    ) -> tuple[list[Rotation | None], list[SlidingParts | None]]:
        """Returns for each group the rotation of a forward's tokens, without those of sliding sequences, and the parts
        of these sequences."""
        table = self._table
        if table.sliding.count == 0 or not (slides := table.sliding.windows[rows] > 0).any():
            return self._rotations.plan(tokens, rope_lengths), self._no_parts
        sliding = slides.nonzero()[0]
        rotations = self._rotations.plan(tokens, rope_lengths, unrotated=slides[tokens.owners])
        appends = np.diff(tokens.qo_indptr)[sliding].astype(np.int64)
        single = appends == 1
        kinds = [which for which in (sliding[single], sliding[~single]) if which.size]
        parts: list[SlidingParts | None] = []
        groups = zip(self._look_ups, self._rotations.of_indices, self._spans, strict=True)
        for look_up, rotation, span in groups:
            of_kinds = tuple(self._plan_part(rows[which], which, tokens, look_up, rotation, span) for which in kinds)
            parts.append(SlidingParts(sliding, int(appends.sum()), of_kinds))
        return rotations, parts

    def locate(self, rows: Int64Array, tokens: TokenLayout) -> Tensor:
        """Locates tokens like Rotations.locate. A token of a sliding sequence stands at its index among the positions
        kept."""
        if self._table.sliding.count == 0:
            return self._rotations.locate(tokens)
        holes, sinks = self._table.sliding.holes[rows][tokens.owners], self._table.sliding.sinks[rows][tokens.owners]
        positions = tokens.rope_positions
        return upload([positions - np.where(positions >= sinks, holes, 0)], self._rotations.device)[0]

    def rows(self, rows: Int64Array) -> SlidingRows:
        """Returns the standing of rows, sliding or not, including what a forward has appended."""
        return self._table.sliding.rows(rows, self._table.lengths[rows], self._rotations.max_positions)

    def _plan_part(
        self,
        rows: Int64Array,
        which: Int64Array,
        tokens: TokenLayout,
        look_up: PageLookUp,
        rotation: Rotation | None,
        span: Span,
    ) -> SlidingPart:
        """Plans the part of the sequences `which` (int64 [N]) of a forward with these rows."""
        table, begins, ways = self._table, tokens.qo_indptr[which].astype(np.int64), self.rows(rows)
        counts = tokens.qo_indptr[which + 1] - begins
        bounds, slots = look_up.sliding_slots(rows, table.lengths, table.sliding)
        firsts = self._first_places(rows, counts, span) if span.drops_past else None
        return plan_sliding_part(begins, counts, bounds, slots, ways, rotation, self._rotations.device, firsts)

    def _first_places(self, rows: Int64Array, counts: Int64Array, span: Span) -> Int64Array:
        """int64 [N, longest of counts]: how many entries of each row stand before those that each of its counts[i] last
        tokens sees, by the positions of the text."""
        sliding_table = self._table.sliding
        begins = self._table.lengths[rows] + sliding_table.dropped[rows] - counts
        queries = begins[:, None] + np.minimum(np.arange(int(counts.max())), counts[:, None] - 1)
        return sliding_table.places(rows, span.first_needed(queries))

    def indices(self, row: int, begin: int, end: int) -> Int64Array:
        """int64: where a row stores positions begin … end - 1, which it has."""
        sliding_table = self._table.sliding
        found = sliding_table.find(row, begin, end)
        if (found < 0).any():
            sink, gone = int(sliding_table.sinks[row]), int(sliding_table.dropped[row] + sliding_table.holes[row])
            raise InvalidArgument(
                f"begin and end are {begin} and {end}; positions {sink} … {sink + gone - 1} have left the window"
            )
        return found

    def check_cut(self, row: int, length: int) -> None:
        """InvalidArgument unless a row can be cut to `length` indices: no further than what it has not evicted."""
        sliding_table = self._table.sliding
        least = int(sliding_table.sinks[row] + sliding_table.holes[row])
        if int(sliding_table.holes[row] + sliding_table.dropped[row]) and length < least:
            most = int(self._table.lengths[row]) - least
            raise InvalidArgument(f"only the last {most} positions are there; what was before has left the window")

    def check_map(self, row: int, position_map: PositionMap) -> None:
        """InvalidArgument for the map of a sequence that slides in another way, or whose K is rotated in another
        way. Also when a map asks for positions that the row has evicted, or will evict before the map's end."""
        sliding_table = self._table.sliding
        sliding = sliding_table.sliding(row)
        into = position_map.sliding
        all_rotated = sliding is None and into is not None and into.rotated >= position_map.end_position
        if into != sliding and not all_rotated:
            raise InvalidArgument(
                f"the position map is of a sequence with {into}; the sender's sequence has {sliding}: the "
                "receiver must slide alike, and have as much of K rotated"
            )
        cached = int(self._table.lengths[row] + sliding_table.dropped[row])
        begin, end = position_map.start_position, position_map.end_position
        if sliding is None or begin >= cached:
            return
        window, sink = sliding.window, sliding.sink
        positions = np.arange(begin, min(end, cached))
        lost = sliding_table.find(row, begin, min(end, cached)) < 0
        lost |= (positions >= sink) & (positions < end - (window - sink))
        for runs in position_map.runs:
            wanted = positions[lost & (runs.slots()[: positions.size] != SKIP)]
            if wanted.size:
                raise InvalidArgument(
                    f"the position map asks for position {int(wanted[0])}, which does not stay in the sliding window "
                    f"of {window} until position {end} is reached"
                )

    def _apply(self, slides: Slides) -> PageIds:
        """Applies the slides, and returns the pages that are gone."""
        table, moved = self._table, slides.moved
        table.sliding.holes[slides.rows] = slides.holes
        if moved.size == 0:
            return self._nothing
        table.lengths[moved], table.sliding.dropped[moved] = slides.lengths, slides.dropped
        return tuple(group.take_out(moved, slides.firsts, slides.ends) for group in table.groups)
