"""A PEFT folder: an adapter's tensors, and the parts that fill a rank's slot.

Everything that does not fit the model is refused before a tensor is read.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.workers.adapters.peft_config import WEIGHTS, PeftConfig
from tandem.workers.adapters.peft_tensors import PeftDigest, read_tensor
from tandem.workers.checkpoint.errors import CheckpointMissing, InvalidConfig, InvalidWeights, ModelError
from tandem.workers.checkpoint.files import is_there
from tandem.workers.checkpoint.safetensors_file import SafetensorsFile, Slice
from tandem.workers.errors import BadAdapter
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.sharding import slices_of
from tandem.workers.models.weights import served_name
from tandem.workers.weights.adapted import AdaptedPart, AdaptedWeights

PREFIX = "base_model.model."
MATRIX = re.compile(r"(.+)\.lora_([AB])\.weight")
LISTED = 5  # names in an error
ENDS = ("embed_tokens", "lm_head", "embeddings", "wte")


class Found(NamedTuple):
    """An adapter that was read. digest: of its weights and its configuration. rank: the largest of its modules."""

    digest: bytes
    rank: int


class Module(NamedTuple):
    """One module that the adapter changes. a, b: its tensors' names in the file."""

    part: AdaptedPart
    rank: int
    scale: float
    a: str
    b: str


@dataclass(frozen=True)
class AdapterReader:
    """Reads adapters for one rank of a model."""

    config: ModelConfig  # of the rank's shard
    weights: AdaptedWeights

    def read(self, folder: Path, numbers: Tensor) -> Found:
        """Fills the numbers of a slot, [AdaptedWeights.memory.shape[1]], on the CPU. Raises BadAdapter, which names the
        file or the field, what it has and what it must have. Takes seconds for a large one."""
        try:
            config = PeftConfig.read(folder)
            with SafetensorsFile(_weights_of(folder)) as file:
                modules = self._modules(config, file)
                return self._fill(file, modules, PeftDigest(folder), numbers)
        except (ModelError, UnicodeDecodeError) as error:
            raise BadAdapter(str(error)) from error
        except OSError as error:
            raise BadAdapter(f"{folder} cannot be read: {error.strerror}") from error

    def _modules(self, config: PeftConfig, file: SafetensorsFile) -> list[Module]:
        pairs: dict[str, dict[str, str]] = {}
        for name in sorted(file.tensors):
            match = MATRIX.fullmatch(name.removeprefix(PREFIX))
            if match is None or not name.startswith(PREFIX):
                raise InvalidWeights(
                    f"{file.path} has tensor {name:.200}; each must be {PREFIX}<module>.lora_A.weight or lora_B.weight"
                )
            pairs.setdefault(match[1], {})[match[2]] = name
        modules = [self._module(config, file, module, pair) for module, pair in pairs.items()]
        given = {one.part.name for one in modules}
        missing = [name for name in self._targeted(config) if name not in given]
        if missing or not modules:
            raise InvalidWeights(
                f"{file.path} lacks lora_A and lora_B of {_listing(missing) or 'all modules'}, which target_modules of "
                f"{config.source} has"
            )
        return modules

    def _targeted(self, config: PeftConfig) -> list[str]:
        """Returns the parts of the model that the adapter is to change. A pattern may mean fewer than it matches
        here."""
        return [] if isinstance(config.targets, str) else list(filter(config.takes, self.weights.parts))

    def _module(self, config: PeftConfig, file: SafetensorsFile, module: str, pair: Mapping[str, str]) -> Module:
        if missing := {"A", "B"} - set(pair):
            raise InvalidWeights(f"{file.path} lacks lora_{missing.pop()} of module {module:.200}")
        part = self.weights.parts.get(served_name(f"{module}.weight", self.config).removesuffix(".weight"))
        if part is None:
            raise InvalidWeights(f"{file.path} changes module {module:.200}, {self._why_not(module)}")
        if not config.takes(module):
            raise InvalidWeights(f"{file.path} changes module {module:.200}; target_modules has no such module")
        rank, most = config.rank_of(module), self.weights.rank
        if rank > most:
            raise InvalidConfig(
                f"{config.source}: r of module {module:.200} is {rank}; it must be at most {most} (adapters.max_rank)"
            )
        one = Module(part, rank, config.scale_of(module), pair["A"], pair["B"])
        for name, held, of in ((one.a, (rank, part.columns), self._of_a), (one.b, (part.rows, rank), self._of_b)):
            _check(file, name, of(part, torch.empty(held, device="meta"))[0].stored_shape)
        return one

    def _of_a(self, part: AdaptedPart, a: Tensor) -> list[Slice]:
        """Returns the slices of a stored A that fill this rank's `a` [r, K]: its own columns if the weight is split by
        columns, else all."""
        weight = torch.empty(part.rows, part.columns, device="meta")
        first = slices_of(f"{part.name}.weight", weight, self.config, (part.rows, -1))[0]
        return [Slice(a, 1, first.begin, first.extent) if first.dim == 1 else Slice(a)]

    def _of_b(self, part: AdaptedPart, b: Tensor) -> list[Slice]:
        """Returns the slices of a stored B that fill this rank's `b` [n, r]: its own rows if the weight is split by
        rows, else all."""
        return slices_of(f"{part.name}.weight", b, self.config, (b.shape[0], b.shape[1]))

    def _fill(self, file: SafetensorsFile, modules: list[Module], digest: PeftDigest, numbers: Tensor) -> Found:
        numbers.zero_()
        for one in modules:
            a, b = self.weights.views(one.part, numbers)
            held = torch.empty(one.part.rows, one.rank)
            for name, target, of in ((one.a, a[: one.rank], self._of_a), (one.b, held, self._of_b)):
                stored = read_tensor(file, name)
                digest.add(name, stored)
                for piece in of(one.part, target):
                    extent = piece.target.shape[piece.dim]
                    piece.target.copy_(stored.narrow(piece.dim, piece.begin, extent))
            order = one.part.order - one.part.order.min()
            b[:, : one.rank].copy_(held.mul_(one.scale).index_select(0, order))
        return Found(digest.digest(), max(one.rank for one in modules))

    def _why_not(self, module: str) -> str:
        last = module.rpartition(".")[2]
        if last in ENDS:
            return "an embedding or head; adapters of these are not served"
        if ".experts" in module:
            return "of routed experts; adapters of these are not served"
        known = sorted({name.rpartition(".")[2] for name in self.weights.parts})
        return f"which no adapter can change; it must be one of {', '.join(known)} of {self.config.architecture}"


def _weights_of(folder: Path) -> Path:
    """Raises CheckpointMissing."""
    path = folder / WEIGHTS
    if not is_there(path) and (pickles := sorted(one.name for one in folder.glob("*.bin"))):
        raise CheckpointMissing(f"{folder} has {pickles[0]:.200}, a pickle, which is never read; give {WEIGHTS}")
    return path


def _check(file: SafetensorsFile, name: str, shape: tuple[int, ...]) -> None:
    found = file.tensors[name].shape
    if found != shape:
        raise InvalidWeights(f"{file.path}: tensor {name:.200} has shape {list(found)}; it must be {list(shape)}")
    if not file.dtype_of(name).is_floating_point:
        raise InvalidWeights(f"{file.path}: tensor {name:.200} has {file.dtype_of(name)}; it must be floating point")


def _listing(names: list[str]) -> str:
    return ", ".join(names[:LISTED]) + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "")
