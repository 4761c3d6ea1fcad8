"""FlashInfer imported before a fork: that takes over a second, and by itself initialises CUDA, which no fork survives.

Measured with flashinfer 0.6.18 and torch 2.11: afterwards the driver says that cuInit was never called, and forked
processes attend as others do.
"""

import os

import torch

from tandem.cache.kernels.build.nvml import read_driver
from tandem.cache.kernels.flashinfer.modules import ARCHS
from tandem.cache.kernels.flashinfer.wrappers import load_flashinfer


def preload_flashinfer() -> None:
    """load_flashinfer() in a process that is to be forked.

    Its import asks for the GPU's architecture, which would initialise CUDA. The environment answers instead. Other
    calls of CUDA, for kernels that are not used here, are refused.

    Does nothing where that is not known to be right.
    """
    arch = _common_arch()
    if arch is None:
        return
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", arch)
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # for torch.cuda.is_available()
    initialise = torch.cuda._lazy_init
    torch.cuda._lazy_init = _refuse
    try:
        load_flashinfer()
    finally:
        torch.cuda._lazy_init = initialise


def _refuse() -> None:
    raise RuntimeError("this process is to be forked and must not use CUDA")


def _common_arch() -> str | None:
    """Returns FlashInfer's name of the architecture of this host's GPUs. None where they differ, or the name is
    unsure."""
    found = {gpu.capability for gpu in read_driver().gpus}
    return ARCHS.get(found.pop()) if len(found) == 1 else None
