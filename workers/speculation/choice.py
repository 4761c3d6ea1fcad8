"""The drafter that a worker's settings name."""

from tandem.workers.config import SpeculationSettings
from tandem.workers.speculation.drafter import Drafter
from tandem.workers.speculation.ngram import NgramDrafter


def make_drafter(settings: SpeculationSettings) -> Drafter | None:
    """None where nothing is drafted."""
    return NgramDrafter(settings.max_ngram) if settings.method == "ngram" else None
