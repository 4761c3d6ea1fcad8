"""The settings of a cluster's processes, from the cluster's configuration."""

import math
import os
import secrets
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType

from tandem.cache.plan.layout import KVLayout
from tandem.cluster.adapters.folders import read_folder
from tandem.cluster.adapters.values import AdapterSet
from tandem.cluster.config.adapters import AdaptersSection
from tandem.cluster.config.cache_section import CacheSection
from tandem.cluster.config.cluster_config import ClusterConfig
from tandem.cluster.errors import ConfigError
from tandem.cluster.gateway.settings import GatewaySettings
from tandem.cluster.served_model import ServedModel
from tandem.transfer.factory import TRANSPORTS
from tandem.transfer.machine_memory import machine_memory
from tandem.workers.config import ParkingSettings, Role, WorkerConfig
from tandem.workers.pool_pages import HOST_FRACTION, MOST_HOST_BYTES, host_bytes_needed, pages_in, pool_pages
from tandem.workers.runner.reserved_bytes import GPU_MEMORY_UTILIZATION

FIRST_EPOCH = 1
TOKEN_BYTES = 32
CPU_PAGES = 1024
GIB = 1 << 30
ISLANDS = 64  # that there may be at a time
CPU_MESSAGES_PER_SECOND = 400.0
CPU_SEQUENCES = 256
GPU_SEQUENCES = 512
CORES_PER_GATEWAY = 4
MOST_GATEWAYS = 4
GPU_TOKEN_SECONDS = 0.015
CPU_TOKEN_SECONDS = 0.25  # beyond it the router decodes elsewhere; workers have no bound there
CACHE_KEYS = tuple(field.name for field in fields(WorkerConfig) if field.name in CacheSection.model_fields)
"""Keys of section `cache` that workers get under the same names."""


def island_name(config: ClusterConfig, number: int) -> str:
    """Returns the cluster's own name for the first island if the cluster starts with one, else a numbered name."""
    return config.name if (config.num_islands, number) == (1, 0) else f"{config.name}-{number}"


def max_islands(config: ClusterConfig) -> int:
    """Returns the configured number, or the default with room to grow."""
    return config.scaling.max_islands or max(config.num_islands, ISLANDS)


def is_elastic(config: ClusterConfig) -> bool:
    """Returns whether workers of an island come and go while the others serve."""
    return TRANSPORTS[config.island.transport].elastic


def worker_configs(
    config: ClusterConfig, max_model_len: int, island: str | None = None, epoch: int = FIRST_EPOCH, hosts: int = 1
) -> list[WorkerConfig]:
    """Returns a config for each rank of each worker of the island (by default the first), prefill workers first. hosts:
    the hosts on which islands may be.

    The configs share a token of their own, which is written nowhere.
    """
    token = secrets.token_urlsafe(TOKEN_BYTES)
    roles = [Role.PREFILL] * config.island.num_prefill + [Role.DECODE] * config.island.num_decode
    sizes = config.island.ranks
    return [
        WorkerConfig(
            role=role,
            island=island or island_name(config, 0),
            epoch=epoch,
            pe=pe,
            num_pes=len(roles),
            rank=rank,
            ranks=tuple(sizes) if sizes.has_several else (),
            model_path=config.model.path or "",
            dtype=config.model.dtype,
            **{name: getattr(config.cache, name) for name in CACHE_KEYS},
            device=config.island.device,
            load_format=config.model.load_format,
            max_model_len=max_model_len,
            token=token,
            max_batch_tokens=config.scheduler.max_batch_tokens,
            max_sequences=max_sequences(config),
            transport=config.island.transport,
            num_signals=config.island.num_signals or max_sequences(config),
            lease_seconds=config.island.lease_seconds,
            verify_kv=config.island.verify_kv,
            threads=config.island.threads_per_worker,
            workers_on_host=workers_on_host(config, hosts),
            decode_workers=config.island.num_decode if role == Role.DECODE else None,
            max_stream_messages_per_second=stream_messages_per_second(config),
            token_seconds=token_seconds(config),
            token_share=config.scheduler.token_share,
            priority_seconds=config.scheduler.priority_seconds,
            parking=ParkingSettings(
                config.scheduler.max_parked, config.scheduler.parked_seconds, config.scheduler.reserved_output
            ),
            speculation=config.speculation.settings,
            adaptive=is_adaptive(config),
            logging=config.logging.settings,
            record=config.record.settings,
            adapters=config.adapters.settings,
        )
        for pe, role in enumerate(roles)
        for rank in range(sizes[pe])
    ]


def max_sequences(config: ClusterConfig) -> int:
    """Returns the configured number or the device's default. On a GPU each batch size up to it has a CUDA graph."""
    return config.scheduler.max_sequences or (CPU_SEQUENCES if config.island.device == "cpu" else GPU_SEQUENCES)


def gateway_processes(config: ClusterConfig) -> int:
    """Returns the configured number, or one by this machine's cores: one process writes what one core can."""
    cores = os.cpu_count() or 1
    return config.gateway.processes or max(1, min(MOST_GATEWAYS, cores // CORES_PER_GATEWAY))


def stream_messages_per_second(config: ClusterConfig) -> float:
    """Returns the configured rate. By default a CPU limits it to save its time; next to a GPU the gateway's own pace is
    the bound."""
    return config.scheduler.stream_messages_per_second or (
        CPU_MESSAGES_PER_SECOND if config.island.device == "cpu" else math.inf
    )


def is_adaptive(config: ClusterConfig) -> bool:
    """Returns whether any worker may be asked to prefill or decode."""
    return config.scheduler.roles != "split"


def token_seconds(config: ClusterConfig) -> float | None:
    """Returns the configured seconds, or a GPU's default. A CPU has none: even one step takes longer than what suits a
    GPU."""
    return config.scheduler.token_seconds or (GPU_TOKEN_SECONDS if config.island.device == "cuda" else None)


def workers_on_host(config: ClusterConfig, hosts: int) -> int:
    """Returns the most workers of a host if islands are spread evenly over so many hosts. With more threads than a host
    has cores, its workers wait for each other."""
    return math.ceil(config.num_islands / hosts) * config.island.ranks.processes


def utilization_to_fill(config: ClusterConfig) -> float | None:
    """Returns the fraction of each GPU's memory that decides the number of pages; None if the configuration sets the
    number."""
    if config.island.device == "cpu" or config.cache.num_pages is not None:
        return None
    return config.cache.gpu_memory_utilization or GPU_MEMORY_UTILIZATION


def agreed_pages(config: ClusterConfig, rooms: Sequence[int], max_model_len: int) -> int:
    """Returns the pages of every pool. rooms: of each worker, empty if utilization_to_fill() is None.

    Raises ConfigError when so few fit that the longest request could never run.
    """
    if not rooms:
        return config.cache.num_pages or CPU_PAGES
    num_pages, page_size = min(rooms), config.cache.page_size
    if num_pages * page_size < max_model_len:
        raise ConfigError(
            f"cache.gpu_memory_utilization {utilization_to_fill(config)} has room for {num_pages} pages of {page_size} "
            f"tokens, {num_pages * page_size} in all; the longest request has {max_model_len}: raise it, or set "
            f"model.max_model_len to at most {num_pages * page_size}"
        )
    return num_pages


def gateway_settings(config: ClusterConfig, model: ServedModel) -> GatewaySettings:
    """Returns the settings of the first gateway process, as it first starts. GatewaySet derives all others."""
    return GatewaySettings(
        config,
        model,
        port=config.gateway.port,
        http_port=config.gateway.http_port,
        metrics_port=config.metrics.port,
        token_seconds=(token_seconds(config) or CPU_TOKEN_SECONDS) if is_adaptive(config) else None,
        warm_up=config.island.device == "cuda" if config.gateway.warm_up is None else config.gateway.warm_up,
        security=config.security.server,
        peer_token=secrets.token_urlsafe(TOKEN_BYTES),
        adapters=start_adapters(config.adapters),
    )


def start_adapters(section: AdaptersSection) -> AdapterSet:
    """Returns the configured adapters. ConfigError for a folder that holds none."""
    found = {name: read_folder(name, Path(folder), section.max_rank) for name, folder in section.folders.items()}
    return AdapterSet(1 if found else 0, MappingProxyType(found))


def check_memory(worker: WorkerConfig, layout: KVLayout, num_pages: int) -> None:
    """Raises ConfigError if one worker's pages, those of windows and states included, and its host_bytes exceed this
    machine's memory."""
    counts, there = enumerate(pool_pages(worker, layout, num_pages)), machine_memory()
    if worker.host_bytes:
        least = host_bytes_needed(worker, layout, num_pages)
        if not least <= worker.host_bytes < there:
            raise ConfigError(
                f"cache.host_bytes is {worker.host_bytes}; it must hold a page of each layer group and leave some of "
                f"this machine's memory: set from {least} to {there - 1}"
            )
        there -= worker.host_bytes
    needed = sum(count * layout.page_bytes(group) for group, count in counts)
    if needed > there:
        raise ConfigError(
            f"cache.num_pages is {num_pages}; so many pages take {needed / GIB:.1f} GiB in each worker, and this "
            f"machine has {there / GIB:.1f} for them: set at most {pages_in(worker, layout, there)}"
        )


def check_snapshots(worker: WorkerConfig, layout: KVLayout) -> None:
    """Raises ConfigError if host memory is asked for the prefixes of a model with states that keeps no snapshots."""
    if not worker.host_bytes or not layout.recurs or (worker.state_interval and worker.state_share):
        return
    key, value = ("state_share", "0") if worker.state_interval else ("state_interval", "null")
    raise ConfigError(
        f"cache.host_bytes is {worker.host_bytes}; it must be null where cache.{key} is {value} and the model has "
        "recurrent layers: no prefix is cached then"
    )


def check_host_bytes(config: ClusterConfig) -> None:
    """Raises ConfigError if the host memory of all workers, which are on this machine, exceeds its memory:
    cache.host_bytes, cache.parked_bytes and, on GPUs, which pin all of it at the start, adapters.host_bytes. They are
    all on it."""
    cache, workers, there = config.cache, config.num_islands * len(config.island.ranks), machine_memory()
    on_gpus = config.island.device == "cuda"
    decode = workers if is_adaptive(config) else config.num_islands * config.island.num_decode
    asked = [("cache.host_bytes", cache.host_bytes, workers), ("cache.parked_bytes", cache.parked_bytes, decode)]
    if on_gpus and config.adapters.is_on:
        asked.append(("adapters.host_bytes", config.adapters.host_bytes, workers))
    left = there - 1
    if on_gpus and cache.host_bytes is None and cache.prefix_sharing:  # see with_host_bytes()
        left -= min(there // HOST_FRACTION, workers * MOST_HOST_BYTES)
    for key, num_bytes, count in asked:
        most = left // max(count, 1)
        if num_bytes is not None and num_bytes > most:
            raise ConfigError(
                f"{key} is {num_bytes} in each of {count} workers, all on this machine, which has {there / GIB:.1f} "
                f"GiB: set at most {most}"
            )
        left -= (num_bytes or 0) * count
