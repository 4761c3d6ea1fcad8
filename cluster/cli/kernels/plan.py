"""What `tandem build-kernels` compiles for a cluster: planned from its config and its model's, without a device."""

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError
from pathlib import Path

from tandem.cache.attention.page_look_up import SOURCE as PAGE_LOOK_UP
from tandem.cache.kernels.build.build_once import cache_folder
from tandem.cache.kernels.build.native_build import find_library
from tandem.cache.kernels.build.nvml import Driver
from tandem.cache.kernels.build.side_by_side import Build, largest_first
from tandem.cache.kernels.flashinfer.modules import (
    FlashInferModule,
    arch_name,
    folder_name,
    module_folder,
    plan_modules,
)
from tandem.cache.kernels.native.crew import SOURCE as CREW
from tandem.cache.kernels.native.kernels import SOURCE as ATTENTION
from tandem.cache.pages.allocator import SOURCE as PAGE_COUNTS
from tandem.cache.plan.errors import InvalidArgument
from tandem.cluster.config.cluster_config import ClusterConfig
from tandem.cluster.errors import ConfigError, UsageError
from tandem.cluster.supervision.process_settings import worker_configs
from tandem.transfer.copy_plan import SOURCE as COPY_PLAN
from tandem.transfer.nvshmem.kernels.device_build import has_device_puts
from tandem.workers.checkpoint.errors import ModelError
from tandem.workers.kernels.cuda.cubin_build import Cubin, find_cubin
from tandem.workers.kernels.native.layer import SOURCE as LAYER
from tandem.workers.models.drafters.drafter_config import load_drafter_config
from tandem.workers.models.kv_scales import choose_scales
from tandem.workers.models.registry import load_config
from tandem.workers.ranks.device_ranks import exchange_cubin
from tandem.workers.ranks.shared_ranks import SOURCE as SUMS
from tandem.workers.runner.kernel_plan import plan_cubins
from tandem.workers.runner.model_cache import kv_layout

CUBIN_BYTES = 2 << 30  # of one nvcc
C_BYTES = 1 << 29


@dataclass(frozen=True)
class Target:
    """A kind of GPU."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int


# For hosts without a GPU of the kind; by what --gpu takes.
TARGETS = {
    "a100": Target("A100", (8, 0), 108),
    "l40s": Target("L40S", (8, 9), 142),
    "h100": Target("H100", (9, 0), 132),
    "h100-pcie": Target("H100 PCIe", (9, 0), 114),
    "h200": Target("H200", (9, 0), 132),
    "b200": Target("B200", (10, 0), 148),
}


@dataclass(frozen=True)
class KernelPlan:
    """The builds that a cluster needs."""

    missing: tuple[Build, ...]
    there: tuple[str, ...]  # titles of what is built already
    lacking: tuple[str, ...] = ()  # what cannot be built here, and why


def choose_target(gpu: str | None, driver: Driver) -> Target:
    """Returns the named kind of GPU, else this host's. Raises UsageError if there is none."""
    if gpu is not None:
        if gpu.lower() not in TARGETS:
            raise UsageError(f"--gpu is {gpu!r}; it must be one of {', '.join(TARGETS)}")
        return TARGETS[gpu.lower()]
    kinds = {(one.name, one.capability, one.multiprocessors) for one in driver.gpus}
    if len(kinds) != 1:
        found = f"{len(kinds)} kinds of GPU" if kinds else "no GPU"
        raise UsageError(f"this host has {found}; say for which one with --gpu: {', '.join(TARGETS)}")
    return Target(*kinds.pop())


def plan_kernels(config: ClusterConfig, target: Target | None) -> KernelPlan:
    """target: None where island.device is cpu. Raises ConfigError for a checkpoint that cannot be served."""
    try:
        model = load_config(Path(config.model.path or ""), config.model.dtype)
        worker = worker_configs(config, model.max_length)[0]
        drafter = load_drafter_config(worker.speculation, model)
        layout = kv_layout(model, config.cache.page_size, choose_scales(worker, model, drafter), drafter)
    except ModelError as error:
        raise ConfigError(f"model.path: {error}") from error
    except InvalidArgument as error:
        raise ConfigError(f"cache.{error}") from error
    there: list[str] = []
    missing = [
        build
        for build, is_there in _plan_c(config.island.ranks.has_several, on_gpu=target is not None)
        if not is_there or there.append(build.title)
    ]
    lacking: list[str] = []
    if target is not None:
        modules = plan_modules(layout, model.attn_softcap, target.capability, model.latent and model.latent.heads)
        planned = [*_plan_modules(modules, target, lacking)]
        for one in filter(None, (model, drafter)):
            cubins = plan_cubins(one, layout.stored_dtype, target.capability, target.multiprocessors)
            planned += _plan_cubins(cubins)
        exchange = exchange_cubin(target.capability) if config.island.ranks.has_several else None
        planned += _plan_cubins([] if exchange is None else [("sums of ranks", exchange)])
        planned += _plan_device_puts(target)
        wanted = [build for build, is_there in planned if not is_there or there.append(build.title)]
        if wanted and shutil.which("nvcc") is None:
            lacking += [f"{build.title}: nvcc is not on the PATH" for build in wanted]
        else:
            missing += wanted
    return KernelPlan(tuple(largest_first(missing)), tuple(there), tuple(lacking))


def _plan_c(has_several_ranks: bool, *, on_gpu: bool) -> Iterator[tuple[Build, bool]]:
    """Yields the libraries in C. CPU workers also need those for attention, layers and sums of ranks."""
    of_cpus = () if on_gpu else (CREW, ATTENTION, LAYER, *((SUMS,) if has_several_ranks else ()))
    for source in (PAGE_COUNTS, PAGE_LOOK_UP, COPY_PLAN, *of_cpus):
        build = Build(f"C {source.name}", json.dumps({"library": str(source)}), 1, C_BYTES)
        yield build, find_library(source, cache_folder()) is not None


def _plan_modules(
    modules: tuple[FlashInferModule, ...], target: Target, lacking: list[str]
) -> Iterator[tuple[Build, bool]]:
    arch = arch_name(target.capability)
    try:
        folder = module_folder(folder_name([arch]))
    except PackageNotFoundError:
        lacking += [f"{module.title}: flashinfer-python is not installed" for module in modules]
        return
    for module in modules:
        order = {"module": asdict(module), "folder": str(folder), "arch": arch}
        yield (
            Build(module.title, json.dumps(order), module.units, module.compiler_bytes),
            module.marker(folder).exists(),
        )


def _plan_device_puts(target: Target) -> Iterator[tuple[Build, bool]]:
    """Yields the puts for GPUs that are not peer to peer. Nothing if NVSHMEM's device library is not installed."""
    with suppress(FileNotFoundError, ImportError, ValueError):
        order = json.dumps({"device_puts": target.capability})
        yield Build("NVSHMEM device puts", order, 1, CUBIN_BYTES), has_device_puts(cache_folder(), target.capability)


def _plan_cubins(cubins: Iterable[tuple[str, Cubin]]) -> Iterator[tuple[Build, bool]]:
    for title, cubin in cubins:
        order = {"cubin": {"source": str(cubin.source), "defines": cubin.defines, "arch": cubin.arch}}
        yield Build(title, json.dumps(order), 1, CUBIN_BYTES), find_cubin(cubin, cache_folder()) is not None
