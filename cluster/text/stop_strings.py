"""Stop strings over text that comes in pieces."""

from collections.abc import Sequence


class StopStringMatcher:
    """Searches one request's text for the first complete stop string, and holds back what may begin one.

    push and flush return the text up to the stop string, or with it if `include` is set. Of stop strings that end at
    the same character the longest counts, so the pieces do not matter.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is now final; "" after a match (see `matched`)."""
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
        """The text that was held back, at the end of the request."""
        held, self._held = self._held, ""
        return held

    def _count_held(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        held = 0
        for stop in self._stops:
            begin = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= begin < len(text) - held:
                if stop.startswith(text[begin:]):
                    held = len(text) - begin
                begin = text.find(stop[0], begin + 1)
        return held
