"""Checks of a LoRA adapter's folder that need no worker."""

from pathlib import Path

from tandem.cluster.adapters.values import Adapter
from tandem.cluster.errors import ConfigError, InvalidRequest
from tandem.workers.adapters.peft_config import WEIGHTS, PeftConfig
from tandem.workers.checkpoint.errors import ModelError
from tandem.workers.checkpoint.files import is_there

PICKLE = "adapter_model.bin"


def check_folder(folder: Path, max_rank: int) -> int:
    """Returns the adapter's largest rank, after all checks that need no torch and no model. Raises InvalidRequest,
    which names the file and the field."""
    try:
        config = PeftConfig.read(folder)
    except (ModelError, UnicodeDecodeError) as error:
        if not folder.is_dir():
            raise InvalidRequest(f"path is {folder}; it must be the folder of a PEFT adapter") from None
        raise InvalidRequest(str(error)) from None
    except OSError as error:
        raise InvalidRequest(f"path is {folder}; it cannot be read: {error.strerror}") from None
    rank = max((config.rank, *config.ranks.values()))
    if rank > max_rank:
        raise InvalidRequest(f"{config.source}: r is {rank}; it must be at most {max_rank} (adapters.max_rank)")
    if not is_there(folder / WEIGHTS):
        pickled = f", but {PICKLE}, a pickle, which is never read" if (folder / PICKLE).exists() else ""
        raise InvalidRequest(f"{folder} has no {WEIGHTS}{pickled}; give a PEFT adapter with safetensors")
    return rank


def read_folder(name: str, folder: Path, max_rank: int) -> Adapter:
    """Returns an adapter of adapters.folders, with the digest that workers compute. ConfigError for a folder without an
    adapter.

    Reads the whole file. Imports torch.
    """
    from tandem.workers.adapters.peft_tensors import digest_of

    try:
        rank, digest = check_folder(folder, max_rank), digest_of(folder)
    except (ModelError, InvalidRequest) as error:
        raise ConfigError(f"adapters.folders.{name}: {error}") from None
    except OSError as error:
        raise ConfigError(f"adapters.folders.{name} is {folder}; it cannot be read: {error.strerror}") from None
    return Adapter(name, str(folder), digest, rank)
