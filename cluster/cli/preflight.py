"""What `tandem up` checks before it imports torch and Ray: model, GPUs, ports, files, shared memory, disk.

Each check takes milliseconds. An error names the key or resource, what was found and what to do.
"""

import os
import re
import resource
from collections.abc import Iterator, Set
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from tandem.cache.kernels.build.build_once import cache_folder
from tandem.cache.kernels.build.nvml import Driver, read_driver
from tandem.cluster.adapters.folders import check_folder
from tandem.cluster.cli.gpu_room import lacking_room
from tandem.cluster.cli.rank_room import (
    gpu_shapes,
    lacking_for_ranks,
    too_many_workers,
    warn_of_ranks,
    warn_of_workers,
)
from tandem.cluster.config.cluster_config import ClusterConfig
from tandem.cluster.config.model import download_hint
from tandem.cluster.config.sections import ModelSection
from tandem.cluster.credentials import is_loopback
from tandem.cluster.errors import ConfigError, InvalidRequest, StartFailed
from tandem.cluster.processes.ray_access import asked_host, check_ray_answers, machine_address
from tandem.cluster.supervision.islands.disk_room import check_disk_bytes
from tandem.cluster.supervision.shared_ports import check_ports
from tandem.cluster.tools.nearest_families import nearest_families
from tandem.transfer.factory import TRANSPORTS
from tandem.workers.checkpoint.adapter_bytes import least_adapter_bytes
from tandem.workers.checkpoint.architectures import read_architecture
from tandem.workers.checkpoint.errors import ModelError, UnknownArchitecture
from tandem.workers.checkpoint.fields import Fields
from tandem.workers.checkpoint.first_checks import first_checks
from tandem.workers.checkpoint.structure import structure

FILES = 1024  # that a process may have open, at least
MOST_FILES = 1 << 16
RAY_SHM_BYTES = 80 << 20  # of /dev/shm: Ray's object store, which it keeps in its temporary folder else
GPU_SHM_BYTES = 256 << 20  # NCCL's buffers, too
TEMP_BYTES = 256 << 20  # Ray's sockets and logs
KERNEL_BYTES = 1 << 30  # compiled kernels and what compilers leave beside them
LOG_BYTES = 64 << 20  # what one log may grow to
DENSE = frozenset({"sliding windows", "softcaps"})  # all that families without multi-token prediction may have
MIB = 1 << 20
SHM = Path("/dev/shm")
CONFIGS = {  # by the GPUs that they need
    0: "deploy/local.yaml",
    1: "deploy/gpu-1.yaml",
    2: "deploy/gpu-1p1d.yaml",
    4: "deploy/gpu-2p2d.yaml",
}


def check_host(config: ClusterConfig, *, own_ray: bool, beside: Set[int] = frozenset()) -> list[str]:
    """Returns warnings. own_ray: Ray is started here, so this host must have what the workers need. beside: as
    check_ports()'s.

    Raises ConfigError for what the configuration asks of this host in vain, StartFailed for what this host lacks.
    """
    check_model(config)
    of_gpus = _check_gpus(config, read_driver(), replaces=bool(beside))
    findings = [*of_gpus, *too_many_workers(config)] if own_ray else []
    if own_ray and not findings:
        findings += _check_packages(config)
    if findings:
        raise ConfigError("\n".join(findings))
    config.security.check()
    check_ports(config.gateway, config.metrics, beside)
    limit = raise_file_limit()
    folders = _check_folders(config, config.processes if own_ray else 1)
    lacking = [*_check_files(limit), *folders]
    lacking += [*_check_room(config), *lacking_for_ranks(config)] if own_ray else []
    if lacking:
        raise StartFailed("\n".join(lacking))
    if own_ray:
        check_disk_bytes(config)
    warnings = [*_warn_of_plain_text(config), *_warn_of_files(config, limit)]
    of_host = [*_warn_of_shm(), *warn_of_ranks(config), *warn_of_workers(config)] if own_ray else []
    return [*_warn_of_tokenizer(config), *warnings, *of_host, *_warn_of_load()]


def check_ray(address: str | None) -> None:
    """Raises StartFailed unless a Ray answers at the address. Passes None, which starts a Ray here, and auto."""
    if address not in (None, "auto"):
        check_ray_answers(address, asked_host(address, machine_address()))


@contextmanager
def as_typed(typed: object, found: str | None) -> Iterator[None]:
    """Makes errors of a start show the model's path as it was typed, not the folder that was found by it."""
    try:
        yield
    except (ConfigError, StartFailed) as error:
        if not isinstance(typed, str) or not typed or found is None or typed == found:
            raise
        raise type(error)(re.sub(rf"{re.escape(found)}(?![\w.-])", lambda _: typed, str(error))) from error


def require_model(config: ClusterConfig) -> None:
    """Raises ConfigError if no model is given."""
    if config.model.path is None:
        raise ConfigError(
            "model.path is null; it must be a checkpoint folder or a hub id: give --model, or set it in the YAML"
        )


def check_model(config: ClusterConfig) -> None:
    """Raises ConfigError for a model that is not given, or whose folder is no checkpoint."""
    require_model(config)
    section, folder = config.model, Path(config.model.path or "")
    findings = list(_check_model(section))
    if findings:
        raise ConfigError("\n".join(findings))
    try:
        longest = first_checks(folder, has_weights=section.load_format == "safetensors")
    except UnknownArchitecture as error:
        nearest = nearest_families(Fields.from_file(folder / "config.json").values)
        raise ConfigError(f"model.path: {error}\nmodel.path: {nearest}") from None
    except ModelError as error:
        raise ConfigError(f"model.path: {error}") from None
    _check_draft(config)
    _check_divided(config, Fields.from_file(folder / "config.json"))
    _check_adapters(config)
    if longest is not None and (section.max_model_len or 0) > longest:
        raise ConfigError(f"model.max_model_len is {section.max_model_len}; the checkpoint takes at most {longest}")


def _check_divided(config: ClusterConfig, fields: Fields) -> None:
    """Raises ConfigError for ranks and drafts that no family with this config.json takes."""
    heads = fields.raw("num_attention_heads")
    for key in ("prefill_ranks", "decode_ranks"):
        ranks = getattr(config.island, key)
        if isinstance(heads, int) and heads % ranks:
            raise ConfigError(f"island.{key} is {ranks}; it must divide the model's num_attention_heads, {heads}")
    is_dense = structure(fields.values) <= DENSE and not isinstance(fields.raw("text_config"), dict)
    if config.speculation.method == "mtp" and is_dense:
        raise ConfigError(
            f"speculation.method is 'mtp'; {read_architecture(fields)} has no layer for multi-token prediction: set "
            "none, ngram, draft_model or eagle3"
        )


def _check_packages(config: ClusterConfig) -> Iterator[str]:
    transport = TRANSPORTS.get(config.island.transport)
    if transport is not None and transport.package and find_spec(transport.package) is None:
        yield (
            f"island.transport is {config.island.transport!r}; its package {transport.package} is not installed: "
            f"{transport.install}"
        )


def _check_adapters(config: ClusterConfig) -> None:
    """Raises ConfigError for a folder whose configuration shows that it holds no adapter, and for host memory that
    holds none. Workers read the whole folder."""
    section = config.adapters
    findings = [*_check_host_bytes(config)] if section.is_on else []
    for name, folder in section.folders.items():
        try:
            check_folder(Path(folder), section.max_rank)
        except InvalidRequest as error:
            findings.append(f"adapters.folders.{name}: {error}")
    if findings:
        raise ConfigError("\n".join(findings))


def _check_host_bytes(config: ClusterConfig) -> Iterator[str]:
    """Yields an error if a worker's host bytes are too few for an adapter."""
    section, island = config.adapters, config.island
    needed, ranks = max(
        (ranks * least_adapter_bytes(Path(config.model.path or ""), config.model.dtype, section.max_rank, ranks), ranks)
        for ranks in {island.prefill_ranks, island.decode_ranks}
    )
    if section.host_bytes < needed:
        each = f" on each of the {ranks} ranks of a worker" if ranks > 1 else ""
        yield (
            f"adapters.host_bytes is {section.host_bytes}; it must be at least {needed}, the bytes of one adapter of "
            f"rank {section.max_rank} (adapters.max_rank){each}"
        )


def _check_draft(config: ClusterConfig) -> None:
    """Raises ConfigError for a folder that is no model's. The launcher reads it all; heads have other architectures."""
    folder = Path(config.speculation.draft or "")
    try:
        if config.speculation.method == "draft_model":
            first_checks(folder, has_weights=config.model.load_format == "safetensors")
    except ModelError as error:
        raise ConfigError(f"speculation.draft: {error}") from None


def fitting_config(gpus: int) -> str:
    """Returns the shipped configuration that uses most of this many GPUs."""
    return CONFIGS[max(needed for needed in CONFIGS if needed <= gpus)]


def _check_model(section: ModelSection) -> Iterator[str]:
    """Yields signs that the folder is no checkpoint. The launcher reads it all."""
    folder = Path(section.path or "")
    typed = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    if not folder.is_dir():
        found = "it is a file" if folder.exists() else "there is no such folder"
        hint = download_hint(section.path or "")
        yield f"model.path is {typed}; {found}: give the folder of a Hugging Face checkpoint, or a hub id{hint}"
    elif not (folder / "config.json").is_file():
        others = sorted({path.suffix for path in folder.iterdir() if path.suffix in (".gguf", ".bin", ".pt", ".pth")})
        found = f"; it has {' and '.join(others)} files, which are not served" if others else ""
        yield (
            f"model.path is {typed}, which has no config.json{found}: a Hugging Face checkpoint has "
            "config.json and *.safetensors"
        )
    elif section.load_format == "safetensors" and not any(folder.glob("*.safetensors")):
        yield (
            f"model.path is {typed}, which has no *.safetensors: download them, or try random weights with "
            "--set model.load_format=dummy"
        )


def _warn_of_tokenizer(config: ClusterConfig) -> Iterator[str]:
    if not (Path(config.model.path or "") / "tokenizer.json").exists():
        yield "the model has no tokenizer.json: prompts and answers are token ids alone, and chats are refused"


def _check_gpus(config: ClusterConfig, driver: Driver, *, replaces: bool = False) -> Iterator[str]:
    """replaces: a cluster that ends soon may have the GPUs' memory."""
    if config.island.device != "cuda":
        return
    needed, there = config.processes, driver.visible
    if there and "RAY_OVERRIDE_RESOURCES" in os.environ:
        return
    if there >= needed:
        if not replaces:
            yield from lacking_room(config, driver)
        return
    if not driver.version:
        found = "this host has no GPU, or no NVIDIA driver"
    else:
        hidden = f" ({len(driver.gpus)} without CUDA_VISIBLE_DEVICES)" if there < len(driver.gpus) else ""
        found = f"this host has {there}{hidden}"
    runs = f"{fitting_config(there)} runs here"
    if config.island.ranks.has_several and (shapes := gpu_shapes(there)):
        runs += f", also with prefill_ranks + decode_ranks of {', '.join(shapes)}"
    yield (
        f"island.device is cuda and the workers need {needed} GPUs; {found}: {runs}, or set "
        "island.num_prefill, num_decode and num_islands; `tandem doctor` says more"
    )


def raise_file_limit() -> int:
    """Raises the soft limit of open files as far as it may be, and returns it. Processes started later inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MOST_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def _check_files(limit: int) -> Iterator[str]:
    if limit < FILES:
        yield (
            f"the limit of open files is {limit}; at least {FILES} are needed: raise it with `ulimit -n {MOST_FILES}`, "
            "LimitNOFILE= in a systemd unit, or --ulimit nofile= of a container"
        )


def _warn_of_plain_text(config: ClusterConfig) -> Iterator[str]:
    section = config.gateway
    for key, host in (("gateway.host", section.host), ("metrics.host", config.metrics.host)):
        used = key == "gateway.host" or config.metrics.port is not None
        if config.security.tls_at_proxy and used and not is_loopback(host):
            yield (
                f"security.tls_at_proxy is true, and {key} is {host!r}: tokens, prompts and answers pass there without "
                "TLS; let nobody but the proxy reach these ports"
            )


def _warn_of_files(config: ClusterConfig, limit: int) -> Iterator[str]:
    calls = config.gateway.max_calls
    if calls + FILES > limit:
        yield (
            f"the limit of open files is {limit}: fewer clients than gateway.max_calls, {calls}, can connect at a "
            f"time; `ulimit -n {calls + FILES}` is enough"
        )


def _check_folders(config: ClusterConfig, workers: int) -> Iterator[str]:
    """workers: on this host, at least."""
    if config.logging.folder is not None:
        advice = "set logging.folder to another one; null leaves logs to Ray"
        for finding in _check_free(Path(config.logging.folder), LOG_BYTES, advice):
            yield f"logging.folder: {finding}"
    if config.record.folder is not None:
        most = config.record.max_mib
        each = f"{most} for each of {workers} workers" if workers > 1 else f"{most} for a worker"
        advice = f"set record.folder to another one, or record.max_mib, {each}, to less"
        for finding in _check_free(Path(config.record.folder), workers * most * MIB, advice):
            yield f"record.folder: {finding}"


def _check_room(config: ClusterConfig) -> Iterator[str]:
    on_gpu = config.island.device == "cuda"
    base = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    yield from _check_free(Path(base), TEMP_BYTES, "free some, or set RAY_TMPDIR to another folder for Ray's files")
    if config.cache.disk_path is not None:  # check_disk_bytes() counts its bytes
        for finding in _check_free(Path(config.cache.disk_path), 0, "set cache.disk_path to another one"):
            yield f"cache.disk_path: {finding}"
    if on_gpu:
        yield from _check_free(SHM, GPU_SHM_BYTES, "mount a larger tmpfs there; in a container, --shm-size=8g")
        advice = "free some, or set TANDEM_KERNEL_CACHE to another folder for compiled kernels"
        yield from _check_free(cache_folder(), KERNEL_BYTES, advice)


def _check_free(folder: Path, needed: int, advice: str) -> Iterator[str]:
    """folder: itself, or the nearest one above it that exists."""
    there = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
    try:
        stat = os.statvfs(there)
    except OSError as error:
        yield f"{folder} cannot be used: {error.strerror}; {advice}"
        return
    free = stat.f_frsize * stat.f_bavail
    if not there.is_dir():
        yield f"{folder} is no folder; {advice}"
    elif free < needed:
        yield f"{folder} has {free // MIB} MiB free; at least {needed // MIB} are needed: {advice}"
    elif not os.access(there, os.W_OK):
        yield f"{folder} cannot be written; {advice}"


def _warn_of_shm() -> Iterator[str]:
    """Warns of a small /dev/shm. CPU workers can do with any size: their pages are in memory files."""
    if any(_check_free(SHM, RAY_SHM_BYTES, "")):
        yield f"{SHM} has less than {RAY_SHM_BYTES // MIB} MiB free: Ray keeps its objects in its temporary folder"


def _warn_of_load() -> Iterator[str]:
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > 2 * cores:
        yield f"this host is busy, a load of {load:.0f} on {cores} cores: the start takes longer than it would"
