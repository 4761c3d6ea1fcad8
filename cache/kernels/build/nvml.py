"""This host's GPUs as NVIDIA's management library (NVML) sees them. It needs neither torch nor a CUDA context."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

VISIBLE = "CUDA_VISIBLE_DEVICES"
CORES_64 = ((7, 0), (7, 5), (8, 0))  # whose multiprocessors have 64 cores; later ones have 128


@dataclass(frozen=True)
class Gpu:
    """One GPU of this host."""

    name: str
    memory: int  # bytes
    capability: tuple[int, int]  # of its architecture, (9, 0) for Hopper
    multiprocessors: int = 0  # 0: NVML does not say
    used: int = 0  # bytes, by any process
    uuid: str = ""
    holders: tuple[tuple[int, int], ...] = ()  # pids of processes with a CUDA context there, and their bytes if known


@dataclass(frozen=True)
class Driver:
    """NVIDIA's driver and its GPUs. A host without the driver has version ""."""

    version: str = ""
    gpus: tuple[Gpu, ...] = ()
    links: tuple[tuple[int, int], ...] = ()  # pairs of GPUs that NVLink joins, the lower number first

    @property
    def visible(self) -> int:
        """How many GPUs a process that is started here may use, as CUDA_VISIBLE_DEVICES says."""
        named = os.environ.get(VISIBLE)
        if named is None:
            return len(self.gpus)
        listed = [part for part in named.split(",") if part.strip() not in ("", "-1", "NoDevFiles")]
        return min(len(self.gpus), len(listed))

    @property
    def visible_gpus(self) -> tuple[int, ...]:
        """Their numbers, in the order in which such a process sees them."""
        named = os.environ.get(VISIBLE)
        if named is None:
            return tuple(range(len(self.gpus)))
        found = list[int]()
        for part in (part.strip() for part in named.split(",")):
            numbers = [
                number for number, gpu in enumerate(self.gpus) if part == str(number) or (part and gpu.uuid.startswith(part))
            ]
            if len(numbers) != 1:
                break  # CUDA ends the list there
            found += numbers
        return tuple(found)


def read_driver() -> Driver:
    """Reads the driver; Driver() where there is none. Takes some ms."""
    with _library() as nvml:
        if nvml is None:
            return Driver()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        pairs = [(i, j) for i in range(len(handles)) for j in range(i + 1, len(handles))]
        links = tuple(pair for pair in pairs if _linked(nvml, *(handles[index] for index in pair)))
        return Driver(str(nvml.nvmlSystemGetDriverVersion()), tuple(_gpu(nvml, one) for one in handles), links)
    return Driver()


def bytes_of_others(uuid: str) -> int | None:
    """What other processes hold of a GPU. None where there is no driver, or it does not tell what this process holds.

    What the driver itself keeps of the GPU counts for nobody. Takes some ms, and may wait for a driver that is stuck.
    """
    with _library() as nvml:
        if nvml is None:
            return None
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        own = dict(_holders(nvml, handle)).get(os.getpid(), 0)
        used = int(nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2).used)  # without what is reserved
        return max(0, used - own) if own else None
    return None


@contextmanager
def _library() -> Iterator[Any]:
    """pynvml, initialised; None where it or the driver is missing, or the driver does not answer."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # ImportError, and NVMLError of many kinds
        yield None
        return
    try:
        with suppress(pynvml.NVMLError):
            yield pynvml
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _gpu(nvml: Any, handle: Any) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    capability = tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle))
    try:
        multiprocessors = nvml.nvmlDeviceGetNumGpuCores(handle) // (64 if capability in CORES_64 else 128)
    except nvml.NVMLError:
        multiprocessors = 0
    name, total, used = str(nvml.nvmlDeviceGetName(handle)), int(memory.total), int(memory.used)
    return Gpu(name, total, capability, multiprocessors, used, str(nvml.nvmlDeviceGetUUID(handle)), _holders(nvml, handle))


def _holders(nvml: Any, handle: Any) -> tuple[tuple[int, int], ...]:
    """Returns the processes that this process can see, with their bytes. In a container it sees its own only."""
    try:
        running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:
        return ()
    return tuple((int(one.pid), int(one.usedGpuMemory or 0)) for one in running)


def _linked(nvml: Any, one: Any, other: Any) -> bool:
    try:
        return nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK) == nvml.NVML_P2P_STATUS_OK
    except nvml.NVMLError:
        return False
