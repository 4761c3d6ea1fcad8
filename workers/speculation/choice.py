"""The drafter that a worker's settings name."""

from tandem.workers.config import SpeculationSettings
from tandem.workers.engine.engine import Engine
from tandem.workers.speculation.drafter import Drafter
from tandem.workers.speculation.model_drafter import ModelDrafter
from tandem.workers.speculation.ngram import NgramDrafter


def make_drafter(settings: SpeculationSettings, engine: Engine) -> Drafter | None:
    """None for no drafts. engine: holds the drafting model, if there is one."""
    if settings.method == "none":
        return None
    return NgramDrafter(settings.max_ngram) if settings.method == "ngram" else ModelDrafter(engine)
