"""Loads a checkpoint into a decoder that also drafts."""

from pathlib import Path

from tandem.workers.config import SpeculationSettings
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.decoder import DenseDecoder
from tandem.workers.models.drafters.drafted_decoder import DraftedDecoder
from tandem.workers.models.drafters.eagle3 import Eagle3Head, load_eagle3
from tandem.workers.models.drafters.head import HeadedDecoder
from tandem.workers.models.drafters.mtp import MtpHead, load_mtp
from tandem.workers.models.weights import META, ReportBytes, check_weights, load_decoder

Model = DenseDecoder | DraftedDecoder | HeadedDecoder  # what a worker computes


def load_drafter(
    folder: Path,
    speculation: SpeculationSettings,
    target: DenseDecoder,
    drafter: ModelConfig,
    *,
    load_format: str = "safetensors",
    report: ReportBytes | None = None,
) -> DraftedDecoder | HeadedDecoder:
    """folder: of the target. drafter: what load_drafter_config() gives for it. Raises as load_parameters."""
    draft, device, model = Path(speculation.draft), target.device, target.config
    if speculation.method == "draft_model":
        own = load_decoder(draft, drafter, load_format=load_format, device=device, report=report, ranks=target.ranks)
        return DraftedDecoder(target, own)
    if speculation.method == "mtp":
        mtp = load_mtp(folder, drafter, model, device, load_format, report)
        return HeadedDecoder(target, MtpHead(drafter, mtp, target))
    eagle3 = load_eagle3(draft, drafter, model, device, load_format, report)
    return HeadedDecoder(target, Eagle3Head(drafter, eagle3, target))


def check_drafter_weights(
    folder: Path, speculation: SpeculationSettings, target: ModelConfig, drafter: ModelConfig
) -> None:
    """Raises what load_drafter() would raise for these files as they are, from their headers and sizes alone."""
    draft = Path(speculation.draft)
    if speculation.method == "draft_model":
        check_weights(draft, drafter)
    elif speculation.method == "mtp":
        load_mtp(folder, drafter, target, META)
    else:
        load_eagle3(draft, drafter, target, META)
