"""Lists the files that hold a checkpoint's weights. It needs no torch."""

from collections.abc import Iterable
from pathlib import Path

from tandem.workers.checkpoint.errors import CheckpointMissing, InvalidConfig
from tandem.workers.checkpoint.fields import SHOWN, Fields
from tandem.workers.checkpoint.files import MAX_NAME, is_file_name, is_there

INDEX = "model.safetensors.index.json"
LISTED = 5  # names in an error
MAX_FILES = 4096


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint: model.safetensors, as transformers has it, else those that its index
    names, else all there are. Raises CheckpointMissing and InvalidConfig."""
    single = folder / "model.safetensors"
    if is_there(single):
        return [single]
    index = folder / INDEX
    if is_there(index):
        weight_map = Fields.from_file(index).section("weight_map")
        names = sorted({weight_map.text(tensor) for tensor in weight_map.names()})
        outside = [name for name in names if not is_file_name(name)]
        if not names or outside:
            named = listing(outside) if outside else "no file"
            raise InvalidConfig(
                f"{index}: weight_map names {named}; it must name files of its folder, each in 1 to {MAX_NAME} bytes"
            )
        if len(names) > MAX_FILES:
            raise InvalidConfig(f"{index}: weight_map names {len(names)} files; it may name at most {MAX_FILES}")
        missing = [name for name in names if not is_there(folder / name)]
        if missing:
            raise CheckpointMissing(f"{folder} lacks {listing(missing)}, of {len(names)} files that {INDEX} names")
        return [folder / name for name in names]
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        found = f"; {listing(pickles)} is a pickle, which is never read: convert it to safetensors" if pickles else ""
        raise CheckpointMissing(f"{folder} has no weights; it must have model.safetensors or {INDEX}{found}")
    return paths


def listing(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(SHOWN.repr(name)[1:-1] for name in names[:LISTED]) + more
