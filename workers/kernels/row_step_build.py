"""row_step.cu, compiled for the shape of a model."""

import logging
import subprocess
from pathlib import Path

from tandem.transfer.errors import TransportError
from tandem.workers.kernels.cubin_build import build_cubin

SOURCE = Path(__file__).with_name("row_step.cu")

log = logging.getLogger(__name__)


def load_row_step(folder: Path, defines: tuple[str, ...], capability: tuple[int, int]) -> bytes | None:
    """build_row_step(); None after a warning in the log where that cannot be."""
    try:
        return build_row_step(folder, defines, capability)
    except (OSError, subprocess.SubprocessError, TransportError) as error:
        reason = getattr(error, "stderr", None) or error
        log.warning("row_step.cu is not there, steps of one row take five kernels a layer: %s", str(reason).strip())
        return None


def build_row_step(folder: Path, defines: tuple[str, ...], capability: tuple[int, int]) -> bytes:
    """The cubin, see build_cubin. capability: of the GPU, as torch gives it."""
    return build_cubin(SOURCE, folder, defines, "".join(map(str, capability)))
