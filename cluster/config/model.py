"""Finds a checkpoint: a folder, or a hub id in this machine's Hugging Face cache. Nothing is downloaded."""

import os
import re
from pathlib import Path

from tandem.workers.checkpoint.files import MAX_NAME

MAX_PATH = 4095  # bytes, as Linux has it
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
SNAPSHOT = re.compile(r"models--(.+?)--(.+)")


def usable_path(path: str) -> str:
    """Returns the path. ValueError for a path that no file can have."""
    names = Path(path).parts
    if "\0" in path or len(os.fsencode(path)) > MAX_PATH or any(len(os.fsencode(name)) > MAX_NAME for name in names):
        raise ValueError(f"must be a path of at most {MAX_PATH} bytes, at most {MAX_NAME} in each name, without NUL")
    return path


def find_model(path: str) -> str:
    """Returns the absolute path of a folder, or of a hub id's snapshot in the cache, HF_HUB_CACHE or HF_HOME.

    A folder of that name comes first. An id that is not in the cache counts as a path, too.
    """
    folder = Path(usable_path(path)).expanduser()
    if HUB_ID.fullmatch(path) and not folder.exists():
        folder = _snapshot(path) or folder
    return str(folder.resolve())


def download_hint(path: str) -> str:
    """Returns the command to type if the path, which does not exist, may be a hub id; "" when it cannot be one."""
    folder = Path(path)
    if not folder.is_relative_to(Path.cwd()):
        return ""
    hub_id = str(folder.relative_to(Path.cwd()))
    if not HUB_ID.fullmatch(hub_id):
        return ""
    return f"; if {hub_id} is a hub id, `hf download {hub_id}` brings it into the cache {_cache()}"


def model_name(path: str) -> str:
    """Returns a checkpoint's default name: the hub id of a snapshot, else the name of its folder."""
    folder = Path(path)
    owner = SNAPSHOT.fullmatch(folder.parents[1].name) if folder.parent.name == "snapshots" else None
    return f"{owner[1]}/{owner[2]}" if owner else folder.name


def model_root(path: str) -> str:
    """Returns where clients find the tokenizer: the hub id of a snapshot, else the checkpoint's folder."""
    return model_name(path) if Path(path).parent.name == "snapshots" else path


def _snapshot(hub_id: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError, OSError):
        return None


def _cache() -> str:
    from huggingface_hub.constants import HF_HUB_CACHE

    return str(HF_HUB_CACHE)
