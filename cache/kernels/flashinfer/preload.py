"""FlashInfer imported before a fork: that takes over a second, and by itself initialises CUDA, which no fork survives.

Measured with flashinfer 0.6.18 and torch 2.11: afterwards the driver says that cuInit was never called, and forked
processes attend as others do.
"""

import ctypes
import os

import torch

from tandem.cache.kernels.flashinfer.wrappers import load_flashinfer

ARCHS = {(8, 0): "8.0", (8, 9): "8.9", (9, 0): "9.0a", (10, 0): "10.0a", (10, 3): "10.3a"}


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
    """What FlashInfer calls the architecture of this host's GPUs; None where they differ, or its name is not certain.

    By NVML, which is no part of CUDA. OSError where there is none.
    """
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    found: set[tuple[int, int]] = set()
    if nvml.nvmlInit_v2():
        return None
    try:
        count = ctypes.c_uint()
        failed = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for index in range(count.value):
            device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
            failed |= nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device))
            failed |= nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor))
            found.add((major.value, minor.value))
    finally:
        nvml.nvmlShutdown()
    return ARCHS.get(found.pop()) if len(found) == 1 and not failed else None
