"""Whether the disk of cache.disk_path has room for all workers. Needs neither torch nor Ray."""

import shutil
from pathlib import Path

from tandem.cluster.config.cluster_config import ClusterConfig
from tandem.cluster.errors import ConfigError


def check_disk_bytes(config: ClusterConfig) -> None:
    """ConfigError if the disk of cache.disk_path has less than cache.disk_bytes for each of all workers. They are all
    on this machine. What earlier ones have left there counts as room."""
    cache, workers = config.cache, config.num_islands * len(config.island.ranks)
    if cache.disk_path is None or cache.disk_bytes is None:
        return
    folder = Path(cache.disk_path)
    try:
        there = next(one for one in (folder, *folder.parents) if one.is_dir())
        room = shutil.disk_usage(there).free + sum(map(_size, folder.rglob("*.pages")))
    except OSError as error:
        raise ConfigError(
            f"cache.disk_path is {cache.disk_path}; it cannot be read ({error.strerror}): give a folder that can be"
        ) from error
    most = room // workers
    if cache.disk_bytes > most:
        raise ConfigError(
            f"cache.disk_bytes is {cache.disk_bytes} for each of {workers} workers; the disk of {there} has room for "
            f"{room}: set at most {most}"
        )


def _size(file: Path) -> int:
    """Returns a file's bytes; 0 if it is gone by now: workers of a running cluster may remove it."""
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0
