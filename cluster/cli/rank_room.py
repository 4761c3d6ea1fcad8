"""The workers that suit this host's processors and GPUs, and how many."""

import math
import os
import shutil
from collections.abc import Iterator

from tandem.cache.kernels.build.native_build import COMPILERS
from tandem.cluster.config.cluster_config import ClusterConfig
from tandem.cluster.processes.placement import CPU_FRACTION
from tandem.transfer.island_ranks import MAX_GPU_RANKS


def cpu_shapes(*, compiler: bool) -> str:
    """Returns the ranks that the workers of a small island may have here. compiler: whether there is one for C."""
    if not compiler:
        return "workers of one rank, for several need a C compiler"
    return f"each process on a core of its own while prefill_ranks and decode_ranks are {_cores()} together"


def gpu_shapes(gpus: int) -> list[str]:
    """Returns `P + D` for each pair of ranks of a prefill and a decode worker that this many GPUs serve, if one has
    several. Empty if the GPUs are too few. The numbers divide most models."""
    sizes = [size for size in (1, 2, 4, 8) if size <= MAX_GPU_RANKS]
    pairs = [(prefill, decode) for prefill in sizes for decode in sizes]
    return [f"{prefill} + {decode}" for prefill, decode in pairs if 2 < prefill + decode <= gpus]


def too_many_workers(config: ClusterConfig) -> Iterator[str]:
    """Yields an error if a Ray that is started here would later refuse this many workers."""
    offered = config.ray.num_cpus or os.cpu_count() or 1
    most = int(offered / CPU_FRACTION + 0.5)
    if config.processes > most:
        section = config.island
        yield (
            f"num_islands is {config.num_islands}, each with island.num_prefill {section.num_prefill} and "
            f"island.num_decode {section.num_decode}: {config.processes} worker processes. Ray counts "
            f"{CPU_FRACTION:g} CPU for each, and has {offered} here: start at most {most} workers, or set "
            f"ray.num_cpus to at least {math.ceil(config.processes * CPU_FRACTION)}, which makes no worker faster"
        )


def warn_of_workers(config: ClusterConfig) -> Iterator[str]:
    """Warns about workers of one rank on CPUs; see warn_of_ranks()."""
    cores = _cores()
    if config.island.device == "cpu" and not config.island.ranks.has_several and config.processes > 2 * cores:
        yield (
            f"the workers are {config.processes} processes that compute, and this host has {cores} cores: with more "
            f"than {cores} each one slows the others. Ray's {CPU_FRACTION:g} CPU for a worker is a count, and no limit"
        )


def lacking_for_ranks(config: ClusterConfig) -> Iterator[str]:
    """Yields what this host lacks for several ranks of workers on CPUs."""
    if _are_several(config) and not any(map(shutil.which, COMPILERS)):
        ranks = f"island.prefill_ranks is {config.island.prefill_ranks}, decode_ranks {config.island.decode_ranks}"
        yield f"{ranks}; this host has no C compiler, which several ranks on CPUs need: install gcc, or set both to 1"


def warn_of_ranks(config: ClusterConfig) -> Iterator[str]:
    if _are_several(config) and config.processes > _cores():
        yield (
            f"the workers are {config.processes} processes, and this host has {_cores()} cores: ranks wait for each "
            f"other in every layer, so with more than {_cores()} each token takes longer"
        )


def _are_several(config: ClusterConfig) -> bool:
    return config.island.device == "cpu" and config.island.ranks.has_several


def _cores() -> int:
    return len(os.sched_getaffinity(0))
