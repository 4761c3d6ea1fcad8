"""The drafter that a worker's settings name."""

from tandem.workers.config import SpeculationSettings
from tandem.workers.runner.model_runner import ModelRunner
from tandem.workers.speculation.drafter import Drafter
from tandem.workers.speculation.model_drafter import ModelDrafter
from tandem.workers.speculation.ngram import NgramDrafter


def make_drafter(settings: SpeculationSettings, runner: ModelRunner) -> Drafter | None:
    """None where nothing is drafted. runner: has the model that drafts, if one does."""
    if settings.method == "none":
        return None
    return NgramDrafter(settings.max_ngram) if settings.method == "ngram" else ModelDrafter(runner)
