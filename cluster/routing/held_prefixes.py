"""The prefixes that workers hold in pages and in their stores, and the part that a router may count on."""

from dataclasses import dataclass
from typing import Generic

from tandem.cluster.routing.prefix_view import Holder, PrefixView, PromptKeys
from tandem.proto import worker_pb2


@dataclass
class Stored:
    """A report of what a worker holds in pages or in its store."""

    whole: bool
    added: bytes
    removed: bytes


class HeldPrefixes(Generic[Holder]):
    """The prefixes that workers report. Owned by the event loop.

    Tokens that a worker holds in its store alone count less. If copying a token takes a third of the time to compute
    it, it counts two thirds. If copying takes longer than computing, it counts nothing.
    """

    def __init__(self) -> None:
        self.pages: PrefixView[Holder] = PrefixView()
        self.stored: PrefixView[Holder] = PrefixView()
        """The keys in pages and in stores, for workers that have a store."""
        self._prices: dict[Holder, float] = {}

    def apply(self, holder: Holder, report: worker_pb2.WorkerReport) -> None:
        """Applies a report: see PrefixView.apply."""
        self.pages.apply(holder, report)
        self.stored.apply(holder, Stored(report.stored_whole, report.stored_added, report.stored_removed))
        self._prices[holder] = report.stored_price

    def drop(self, holder: Holder) -> None:
        """Forgets a worker. Idempotent."""
        self.pages.drop(holder)
        self.stored.drop(holder)
        self._prices.pop(holder, None)

    def match(self, prompt: PromptKeys) -> dict[Holder, int]:
        """Returns the tokens at the prompt's beginning that each worker saves; see PrefixView.match."""
        found = self.pages.match(prompt)
        for holder, tokens in self.stored.match(prompt).items() if len(self.stored) else ():
            here = found.get(holder, 0)
            worth = int((tokens - here) * (1 - min(self._prices.get(holder, 0.0), 1.0)))
            if worth > 0:
                found[holder] = here + worth
        return found
