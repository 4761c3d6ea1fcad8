"""What is compiled here for a user: each file once, named by the hash of all that it comes from."""

import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path


def build_once(folder: Path, name: str, key: bytes, make: Callable[[Path], object]) -> Path:
    """The file `folder`/name, with the hash of `key` before its suffix; made by make(path) unless it is there.

    Several processes may do so at once. path: where make() writes the file, in a folder that is empty at first and goes
    afterwards. What it raises comes through, and nothing is left; OSError when `folder` cannot be written.
    """
    digest = hashlib.blake2b(key, digest_size=12).hexdigest()
    built = (folder / name).with_stem(f"{Path(name).stem}-{digest}")
    if not built.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as own:
            made = Path(own) / built.name
            make(made)
            made.replace(built)
    return built
