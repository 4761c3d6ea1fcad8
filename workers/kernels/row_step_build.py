"""Compiles row_step.cu with nvcc for the shape of a model, once per machine, user and kind of GPU."""

import hashlib
import logging
import subprocess
import tempfile
from pathlib import Path

from tandem.transfer.errors import TransportError
from tandem.transfer.kernels.device_build import find_nvcc

SOURCE = Path(__file__).with_name("row_step.cu")
FLAGS = ("-std=c++17", "-O3")
SECONDS_TO_COMPILE = 120.0

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
    """The cubin, from `folder`; compiled unless it is there. Several processes may do so at once.

    defines: as `-DNAME=VALUE`. capability: of the GPU, as torch gives it. Raises TransportError without nvcc,
    subprocess.SubprocessError when compiling fails, OSError when the folder cannot be written.
    """
    nvcc, arch = find_nvcc(), "".join(map(str, capability))
    options = (*FLAGS, *defines, f"-gencode=arch=compute_{arch},code=sm_{arch}")
    texts = [path.read_text(encoding="utf-8") for path in (SOURCE, *sorted(SOURCE.parent.glob("*.cuh")))]
    parts = (*texts, *options, _run([nvcc, "--version"]))
    cubin = folder / f"row-step-{hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()}.cubin"
    if not cubin.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as own:
            made = Path(own) / cubin.name
            _run([nvcc, *options, "-cubin", str(SOURCE), "-o", str(made)])
            made.replace(cubin)
    return cubin.read_bytes()


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS_TO_COMPILE).stdout
