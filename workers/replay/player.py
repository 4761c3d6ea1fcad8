"""Repeats the actions of recorded engines, and compares the results."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from heapq import merge
from typing import Any, NamedTuple

import numpy as np

from tandem.workers.engine.engine import ACTIONS, Engine
from tandem.workers.engine.watched_engine import PARAMETERS
from tandem.workers.errors import RankLost
from tandem.workers.replay.codec import Decoder, Known
from tandem.workers.replay.errors import BadRecord
from tandem.workers.replay.pushes import PushLog
from tandem.workers.replay.record_file import RecordReader
from tandem.workers.replay.value_types import (
    RANK_LOST,
    SECRET_RESULTS,
    ActionEntry,
    EndEntry,
    Pushed,
    ResultEntry,
    TokensEntry,
    Unnoted,
    value_types,
)

WHOLE_ENDS = frozenset({"the worker left its island", "its process ended", RANK_LOST})
"""The ends of records with all that the worker wrote."""
COPIES_SECONDS = 60.0
POLL_SECONDS = 0.0005
MOST_SHOWN = 400  # characters of a value

Show = Callable[[int, "Playback", ActionEntry], None]
"""Gets the number of an action among all, whose it is, and the action, before it is done."""


class Difference(NamedTuple):
    """The first difference of a replay. number: of the action in its file."""

    file: str
    number: int
    action: str
    what: str
    recorded: str
    replayed: str


@dataclass
class Summary:
    """The result of a replay. The counts are of what was compared and found equal, but for tokens_left."""

    files: list[str] = field(default_factory=list)
    actions: int = 0
    by_name: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0  # of the records
    tokens: int = 0
    tokens_left: int = 0  # not compared: they follow from what a worker without a file has written
    page_ids: int = 0  # of sequences that ended
    prefix_hits: int = 0
    pushes: int = 0
    pushed_positions: int = 0
    raised: int = 0
    missing: list[int] = field(default_factory=list)  # PEs without a file
    prompts: bool = True  # whether the records have tokens
    ends: dict[str, str] = field(default_factory=dict)  # of each file, why it ends
    difference: Difference | None = None


class Found(Exception):
    """Raised at the first difference."""

    def __init__(self, what: str, recorded: Any, replayed: Any) -> None:
        super().__init__(what)
        self.what, self.recorded, self.replayed = what, recorded, replayed


class Played(NamedTuple):
    """The entries of an action, up to the next action in its record. They are decoded when the action is repeated,
    because they name results of earlier actions. at: on the host's clock, in nanoseconds."""

    at: int
    entries: list[bytes]


class Playback:
    """One record, and the engine that it is replayed on."""

    def __init__(
        self, reader: RecordReader, engine: Engine, pushes: Sequence[PushLog], summary: Summary, *, whole: bool
    ) -> None:
        """pushes: of each rank of the worker. whole: whether all that peers wrote is replayed, too."""
        self.name = reader.path.name
        self._reader = reader
        self._engine = engine
        self._pushes = pushes
        self._summary = summary
        self._whole = whole
        self._awaited: set[int] = set()  # sequences that a peer writes
        self._tells = True  # whether tokens can be compared
        self._decoder = Decoder(value_types())
        self.action: Any = None  # the last one
        self._number = 0  # of the next one

    def played(self) -> Iterator[Played]:
        """Yields all actions, in order."""
        began, current = self._reader.header.began, None
        for stamp, entry in self._reader.entries():
            if stamp:
                if current is not None:
                    yield current
                current = Played(began + stamp, [])
            elif current is None:
                current = Played(began, [])  # the end of an empty record
            current.entries.append(entry)
        if current is not None:
            yield current
        self._summary.ends.setdefault(self.name, "it was cut off" if self._reader.cut else "its process ended")

    def play(self, one: Played, show: Show) -> None:
        """Repeats the action. Raises Found where the result differs. show: see replay()."""
        decoded = (self._decoder.decode(entry) for entry in one.entries)
        self.action = action = next(decoded)
        if isinstance(action, EndEntry):
            self._end(action)
            return
        self._check(action)
        show(self._summary.actions, self, action)
        result, raised = None, ""
        named = dict(zip(PARAMETERS[action.name], action.arguments, strict=True))
        try:
            result = getattr(self._engine, action.name)(**named)
        except Exception as error:
            raised = type(error).__name__
        pushed = self._pushed()
        if action.name == "expect":
            self._await_copies()
        self._follow(action)
        for note in decoded:
            if isinstance(note, ResultEntry):
                self._settle(note, result, raised, pushed)
            elif isinstance(note, TokensEntry):
                self._read(note)
            elif isinstance(note, EndEntry):
                self._end(note)
            else:
                raise BadRecord(f"{self.name}: a {type(note).__name__} follows action {action.number}")
        self._decoder.forget(action.gone)
        self._summary.actions += 1
        self._summary.by_name[action.name] += 1

    def _end(self, end: EndEntry) -> None:
        self._summary.ends[self.name] = end.reason

    def _pushed(self) -> list[tuple[Pushed, ...]]:
        """Returns what each rank pushed in the last action. Waits until all have done it: a peer may read that in the
        next."""
        try:
            self._engine.wait_for_ranks()
        except RankLost as error:
            raise Found("ranks", "all did it", error) from error
        return [log.take() for log in self._pushes]

    def _await_copies(self) -> None:
        """Returns once a peer may write: in the record it waited for that, too."""
        is_past, deadline = self._engine.peers_mark(), time.monotonic() + COPIES_SECONDS
        while is_past is not None and not is_past():
            if time.monotonic() > deadline:
                raise Found("copies between pools and host memory", "done", f"under way after {COPIES_SECONDS:g} s")
            time.sleep(POLL_SECONDS)

    def _settle(self, note: ResultEntry, result: Any, raised: str, pushed: Sequence[tuple[Pushed, ...]]) -> None:
        """Compares what the action returned and wrote."""
        summary = self._summary
        if raised != note.raised:
            raise Found("exception", note.raised or "none", raised or "none")
        if self._tells or self.action.name not in SECRET_RESULTS:
            self._compare("result", note.value, result)
        for rank, own in enumerate(pushed):
            self._compare(f"pushes of rank {rank}" if rank else "pushes", note.pushed, own)
        self._compare("pages", note.pages, self._engine.pages)
        summary.raised += bool(raised)
        summary.pushes += sum(one.writes for one in note.pushed)
        summary.pushed_positions += sum(one.positions for one in note.pushed)
        if self.action.name == "admit" and note.value:
            summary.prefix_hits += 1
        if self.action.name == "free" and not raised:
            summary.page_ids += sum(pages.size for pages in result)

    def _check(self, action: Any) -> None:
        if not isinstance(action, ActionEntry):
            raise BadRecord(f"{self.name}: a {type(action).__name__} stands where an action is expected")
        if action.number != self._number:
            raise Found("number of the action", self._number, action.number)
        self._number += 1
        if action.name not in ACTIONS:
            raise BadRecord(f"{self.name}: action {action.number} is {action.name!r:.40}; no engine has it")
        if len(action.arguments) != len(PARAMETERS[action.name]):
            raise BadRecord(f"{self.name}: action {action.number} has {len(action.arguments)} arguments")

    def _follow(self, action: ActionEntry) -> None:
        """Stops comparing what follows from a peer's KV, if the peer's file is missing, or its record has ended
        early."""
        if action.name == "expect":
            self._awaited.add(action.arguments[0])
        elif action.name == "received" and action.arguments[0] in self._awaited:
            self._awaited.remove(action.arguments[0])
            if not self._whole or not WHOLE_ENDS.issuperset(self._summary.ends.values()):
                self._tells = False

    def _read(self, note: TokensEntry) -> None:
        samples = self._decoder.known.get(note.launch)
        if samples is None or not hasattr(samples, "wait"):
            raise BadRecord(f"{self.name}: tokens of launch {note.launch} are noted, which is not under way")
        found = samples.wait().token_ids  # type: ignore[attr-defined]
        if not self._tells:
            self._summary.tokens_left += found.size
            return
        self._compare("tokens", note.token_ids, found)
        self._summary.tokens += found.size

    def _compare(self, what: str, recorded: Any, replayed: Any) -> None:
        """Raises Found unless they are alike. Objects that a record knows by number get to be known here."""
        if isinstance(recorded, Unnoted):
            return
        if isinstance(recorded, Known):
            if replayed is None:
                raise Found(what, "an object", None)
            self._decoder.known[recorded.number] = replayed
        elif isinstance(recorded, np.ndarray):
            if not np.array_equal(recorded, replayed):
                raise Found(what, recorded, replayed)
        elif is_dataclass(recorded) and type(recorded) is type(replayed):
            for name, value in vars(recorded).items():
                self._compare(f"{what}.{name}", value, getattr(replayed, name, None))
        elif isinstance(recorded, list | tuple):
            if not isinstance(replayed, Sequence) or len(recorded) != len(replayed):
                raise Found(what, recorded, replayed)
            for number, pair in enumerate(zip(recorded, replayed, strict=True)):
                self._compare(f"{what}[{number}]", *pair)
        elif recorded != replayed:
            raise Found(what, recorded, replayed)


def replay(
    playbacks: Sequence[Playback], summary: Summary, *, until: int | None = None, show: Show = lambda *_: None
) -> None:
    """Does all actions of records of one host, in the order in which they began. Stops at the first difference.

    A peer reads what a worker wrote only after that worker's action has posted its signal, and a page is used again
    only after its writer was quiet. So one after another in this order they find the same memory.

    until: so many actions at most. show: sees each action before it is done.
    """
    began = None
    for at, index, one in _merged(playbacks):
        if summary.actions == until:
            break
        began = at if began is None else began
        summary.seconds = (at - began) / 1e9
        playback = playbacks[index]
        try:
            playback.play(one, show)
        except Found as found:
            action = playback.action
            shown = (str(found.recorded)[:MOST_SHOWN], str(found.replayed)[:MOST_SHOWN])
            summary.difference = Difference(playback.name, action.number, action.name, found.what, *shown)
            break


def _merged(playbacks: Sequence[Playback]) -> Iterable[tuple[int, int, Played]]:
    """Yields the actions of all playbacks in order of time: when each began, the index of its playback, and the
    action."""

    def of(index: int) -> Iterator[tuple[int, int, Played]]:
        return ((one.at, index, one) for one in playbacks[index].played())

    return merge(*map(of, range(len(playbacks))), key=lambda one: one[:2])


def as_json(summary: Summary) -> dict[str, Any]:
    """Returns the summary as plain values."""
    values = asdict(summary)
    values["by_name"] = dict(sorted(summary.by_name.items()))
    values["difference"] = None if summary.difference is None else summary.difference._asdict()
    return values
