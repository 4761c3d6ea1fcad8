"""Stop strings over text that comes in pieces."""

from collections.abc import Sequence


class StopStringMatcher:
    """Watches the text of one request for the first stop string to be complete, and holds back what may begin one.

    Of stop strings that end at the same character the longest counts. So the result depends on the text alone, not on
    the pieces it came in. Joined, what push and flush return is the text up to the stop string, or through it if
    `include` is set.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The part of the text so far that is final; after a match (see `matched`) there is no more."""
        if self.matched is not None or not self._stops:
            return text if self.matched is None else ""
        text = self._held + text
        matches = [(begin + len(stop), begin, stop) for stop in self._stops if (begin := text.find(stop)) >= 0]
        if matches:
            end, begin, self.matched = min(matches)
            self._held = ""
            return text[: end if self._include else begin]
        keep = self._count_held(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What is held back, at the end of the request."""
        held, self._held = self._held, ""
        return held

    def _count_held(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string begins."""
        held = 0
        for stop in self._stops:
            begin = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= begin < len(text) - held:
                if stop.startswith(text[begin:]):
                    held = len(text) - begin
                begin = text.find(stop[0], begin + 1)
        return held
