"""The model that drafts for another: which it is, and whether both fit."""

from pathlib import Path

from tandem.workers.checkpoint.errors import UnsupportedFeature
from tandem.workers.config import SpeculationSettings
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.drafters.eagle3 import eagle3_config
from tandem.workers.models.drafters.mtp import mtp_config
from tandem.workers.models.registry import load_config


def load_drafter_config(speculation: SpeculationSettings, target: ModelConfig) -> ModelConfig | None:
    """Reads the drafter whose layers stand after the layers of `target`; None where drafts come from elsewhere.

    It computes in the target's dtype. Raises ModelError.
    """
    if target.single_blocks is not None and speculation.method == "eagle3":
        raise UnsupportedFeature(
            f"speculation.method is {speculation.method!r}; layers of {target.architecture} are one block each, and a "
            "head takes what whole layers do: set none, ngram or draft_model"
        )
    if target.hyper is not None and speculation.method in ("mtp", "eagle3"):
        raise UnsupportedFeature(
            f"speculation.method is {speculation.method}; {target.architecture} has no single residual that a drafter "
            "could take: take ngram or draft_model"
        )
    if speculation.method in ("mtp", "eagle3", "draft_model") and target.encoder is not None:
        raise UnsupportedFeature(
            f"speculation.method is {speculation.method!r}; with {target.architecture}, which has an encoder, it must "
            "be ngram"
        )
    if speculation.method == "mtp":
        return mtp_config(target)
    if speculation.method == "eagle3":
        return eagle3_config(Path(speculation.draft), target)
    if speculation.method != "draft_model":
        return None
    drafter = load_config(Path(speculation.draft), str(target.dtype).removeprefix("torch."))
    check_drafter(speculation.draft, drafter)
    return drafter


def check_drafter(folder: str, drafter: ModelConfig) -> None:
    """UnsupportedFeature unless `drafter`, of that folder, can draft."""
    if drafter.rope.by_length:
        raise UnsupportedFeature(
            f"{folder} has RoPE of type {drafter.rope.rope_type}, which depends on a sequence's length; give a "
            "drafter with another type"
        )
    if drafter.encoder is not None:
        raise UnsupportedFeature(
            f"{folder} is {drafter.architecture}, which has an encoder; it must be a decoder alone"
        )
    indexed = drafter.latent is not None and drafter.latent.index is not None
    tempered = drafter.chunked is not None and drafter.chunked.temperature is not None
    if indexed or tempered or drafter.compressed is not None or drafter.recurrent is not None:
        raise UnsupportedFeature(f"{folder} is {drafter.architecture}, which does not serve as a drafter")
