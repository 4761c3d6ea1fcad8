"""Identifies a checkpoint without reading all of it."""

import os
from hashlib import blake2b
from pathlib import Path

from tandem.workers.checkpoint.files import open_regular
from tandem.workers.checkpoint.safetensors_file import SafetensorsFile

SAMPLE_BYTES = 4096  # of each tensor
CHUNK_BYTES = 1 << 20
DESCRIPTIONS = ("config.json", "*quant*.json", "*.index.json")


def checkpoint_identity(folder: Path, load_format: str = "safetensors") -> bytes:
    """16 bytes: of its descriptions, and of each file of weights the name, size, time of its last change, header, and
    the middle of each tensor. A copy of a checkpoint with new times counts as another. Of dummy weights, which follow
    from the config, the description alone. Raises CheckpointMissing and InvalidWeights."""
    digest = blake2b(load_format.encode(), digest_size=16)
    for path in sorted({path for pattern in DESCRIPTIONS for path in folder.glob(pattern)}):
        with open_regular(path) as file:
            digest.update(f"\n{path.name}\n".encode())
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
    if load_format == "dummy":
        return digest.digest()
    for path in sorted(folder.glob("*.safetensors")):
        stat = path.stat()
        digest.update(f"\n{path.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
        with SafetensorsFile(path) as stored, open_regular(path) as file:
            for name, tensor in sorted(stored.tensors.items()):
                digest.update(f"{name} {tensor}\n".encode())
                middle = tensor.begin + max(tensor.num_bytes - SAMPLE_BYTES, 0) // 2
                digest.update(os.pread(file.fileno(), min(SAMPLE_BYTES, tensor.num_bytes), middle))
    return digest.digest()
