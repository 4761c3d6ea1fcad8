"""Models of storms, and further settings that their clusters need."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tandem.cluster.tools.architectures import MTP_FIELDS
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tests.support.likely_drafters import make_head, make_llama, make_mtp, make_smaller

SEED, DRAFT_TOKENS = 3, 4
OF_FAMILIES: dict[str, dict[str, Any]] = {
    "t5gemma": {"scheduler.max_batch_tokens": 256},  # a prompt is the encoder's, which one forward computes
}
DRAFTED: dict[str, tuple[Callable[[Path], Path], Callable[[Path, Path], Path] | None]] = {
    "ngram": (make_llama, None),
    "draft_model": (make_llama, make_smaller),
    "mtp": (make_mtp, None),
    "eagle3": (make_llama, make_head),
}
"""Makers of the model and of its drafter's checkpoint, by speculation.method."""


def make_target(folder: Path, arch: str = "llama", speculate: str | None = None) -> tuple[Path, dict[str, Any]]:
    """A model below `folder`, and dotted keys of its cluster's configuration. speculate: a key of DRAFTED, whose model
    has a family of its own, unless `arch` may have a layer for multi-token prediction that drafts."""
    model = folder / "model"
    if speculate is None:
        make_checkpoint(model, arch=arch, size="tiny", seed=SEED)
        return model, OF_FAMILIES.get(arch, {})
    make, make_draft = DRAFTED[speculate]
    if speculate == "mtp" and arch in MTP_FIELDS:
        make_mtp(model, arch)
    else:
        make(model)
    settings = {"speculation.method": speculate, "speculation.tokens": DRAFT_TOKENS}
    if make_draft is not None:
        settings["speculation.draft"] = str(make_draft(folder / "draft", model))
    return model, settings
