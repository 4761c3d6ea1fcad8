"""Checks that other processes leave enough of a GPU for a worker."""

from collections.abc import Iterator
from pathlib import Path

from tandem.cache.kernels.build.nvml import VISIBLE, Driver, Gpu
from tandem.cluster.config.cluster_config import ClusterConfig
from tandem.workers.checkpoint.least_bytes import least_weight_bytes
from tandem.workers.runner.reserved_bytes import GPU_MEMORY_UTILIZATION, RESERVED_BYTES

GIB = 1 << 30
MOST_NAMED = 4  # processes in an error


def holders_of(gpu: Gpu) -> str:
    """Returns how much of a GPU's memory is in use, and by which processes as far as known."""
    largest = sorted(gpu.holders, key=lambda one: -one[1])
    named = [f"process {pid}{_named(pid)}{f' {_gib(size)}' if size else ''}" for pid, size in largest[:MOST_NAMED]]
    more = f" and {len(largest) - MOST_NAMED} more" if len(largest) > MOST_NAMED else ""
    return f"{_gib(gpu.used)} in use by {', '.join(named) or 'other processes'}{more}"


def lacking_room(config: ClusterConfig, driver: Driver) -> Iterator[str]:
    """Yields a line for each GPU that the workers would get and that has no room for one. A rank's part of the weights
    has to fit. Unless cache.num_pages says how large the pool is, so does what a worker reserves beside weights and
    pages."""
    cache, weights = config.cache, 0
    needed = config.processes
    fraction, reserved = 1.0, 0
    if cache.num_pages is None:
        fraction, reserved = cache.gpu_memory_utilization or GPU_MEMORY_UTILIZATION, RESERVED_BYTES
    if config.model.load_format == "safetensors":
        in_16_bits = config.model.dtype != "float32"
        weights = least_weight_bytes(Path(config.model.path or ""), in_16_bits=in_16_bits) // max(config.island.ranks)
    visible = driver.visible_gpus
    rooms = {
        number: int(driver.gpus[number].memory * fraction) - reserved - driver.gpus[number].used for number in visible
    }
    fitting = [number for number in visible if rooms[number] > weights]
    for number in visible[:needed]:
        gpu = driver.gpus[number]
        if number not in fitting:
            yield (
                f"GPU {number} ({gpu.name}, {_gib(gpu.memory)}) has {holders_of(gpu)}; a worker needs at least "
                f"{_gib(weights + reserved)} of {_gib(int(gpu.memory * fraction))} there, {_gib(weights)} of it for "
                f"weights: {_advice(fitting, needed, rooms[number])}"
            )


def _advice(fitting: list[int], needed: int, room: int) -> str:
    fits = f"weights of less than {_gib(room)} would fit" if room > 0 else "no model would fit"
    if len(fitting) >= needed:
        return f"set {VISIBLE}={','.join(map(str, fitting[:needed]))}, or end those processes; {fits} here"
    return f"end those processes, or take a smaller model; {fits}"


def command_of(pid: int) -> str:
    """Returns a process's name; empty if it cannot be seen, as from a container."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return ""


def _named(pid: int) -> str:
    command = command_of(pid)
    return f" ({command})" if command else ""


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
