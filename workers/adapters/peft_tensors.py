"""The tensors of a PEFT folder, and the digest by which all parts of a cluster know an adapter."""

from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

from tandem.cache.plan.prefix_chain import DIGEST_BYTES
from tandem.workers.adapters.peft_config import FILE, WEIGHTS
from tandem.workers.checkpoint.files import read_text
from tandem.workers.checkpoint.safetensors_file import SafetensorsFile, Slice, new_staging

MAX_CONFIG_BYTES = 1 << 20


class PeftDigest:
    """The digest of an adapter's configuration, then of its tensors, which are added in the order of their names."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError, UnicodeDecodeError and ModelError for a configuration that cannot be read."""
        text = read_text(folder / FILE, MAX_CONFIG_BYTES).encode()
        self._hash = blake2b(text, digest_size=DIGEST_BYTES, person=b"peft")

    def add(self, name: str, stored: Tensor) -> None:
        """stored: the whole tensor, as the file has it."""
        self._hash.update(f"{name} {stored.dtype} {tuple(stored.shape)}".encode())
        self._hash.update(stored.view(torch.uint8).numpy().data)

    def digest(self) -> bytes:
        """16 bytes."""
        return self._hash.digest()


def read_tensor(file: SafetensorsFile, name: str) -> Tensor:
    """Reads the whole tensor, as it is stored."""
    stored = torch.empty(file.tensors[name].shape, dtype=file.dtype_of(name))
    staging = new_staging("cpu")
    for part in file.parts(name, Slice(stored)):
        part.read(staging)
    return stored


def digest_of(folder: Path) -> bytes:
    """Returns PeftDigest's digest of the folder's files. Reads them whole. Raises as PeftDigest, and InvalidWeights."""
    digest = PeftDigest(folder)
    with SafetensorsFile(folder / WEIGHTS) as file:
        for name in sorted(file.tensors):
            digest.add(name, read_tensor(file, name))
    return digest.digest()
