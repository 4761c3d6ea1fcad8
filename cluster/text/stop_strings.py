"""Stop strings over text that comes in pieces."""

from collections.abc import Sequence


class StopStringMatcher:
    """Searches one request's text for the first complete stop string, and holds back what may begin one.

    push and flush return the text up to the stop string, or with it if `include` is set. If several stop strings end at
    one character, the longest counts, so the pieces do not matter.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self._passed = 0  # characters of the held text in which no stop string may end
        self.matched: str | None = None

    def push(self, text: str, *, ends: bool = True) -> str:
        """Returns the text that is now final; "" after a match (see `matched`). ends: whether a stop string may end in
        this text. A later stop string may begin in it either way."""
        if self.matched is not None or not self._stops:
            return text if self.matched is None else ""
        text = self._held + text
        if not ends:
            self._passed = len(text)
        matches = [(begin + len(stop), begin, stop) for stop in self._stops if (begin := self._find(stop, text)) >= 0]
        if matches:
            end, begin, self.matched = min(matches)
            self._held = ""
            return text[: end if self._include else begin]
        keep = self._count_held(text)
        final = len(text) - keep
        self._held, self._passed = text[final:], max(0, self._passed - final)
        return text[:final]

    def flush(self) -> str:
        """Returns the text that was held back, at the end of the request."""
        held, self._held = self._held, ""
        return held

    def _find(self, stop: str, text: str) -> int:
        """Returns where the first stop string begins that ends beyond the passed text; -1 if there is none."""
        return text.find(stop, max(0, self._passed + 1 - len(stop)))

    def _count_held(self, text: str) -> int:
        """Returns the length of the longest end of `text` that begins a stop string."""
        held = 0
        for stop in self._stops:
            begin = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= begin < len(text) - held:
                if stop.startswith(text[begin:]):
                    held = len(text) - begin
                begin = text.find(stop[0], begin + 1)
        return held
