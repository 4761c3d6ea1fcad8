"""Loads a checkpoint folder into parameters: safetensors only, in parallel reads, straight into the parameters."""

import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from queue import SimpleQueue
from typing import Generic, TypeVar

import torch
from torch import Tensor

from tandem.cache.plan.layout import DTYPES
from tandem.workers.checkpoint.errors import CheckpointMissing, InvalidConfig, InvalidWeights
from tandem.workers.checkpoint.safetensors_file import STORED_DTYPES, SafetensorsFile, new_staging
from tandem.workers.checkpoint.stored import Plain, StoredWeight, WeightPart
from tandem.workers.checkpoint.weight_files import listing, weight_files
from tandem.workers.config import AdapterSettings
from tandem.workers.models.blocks.adapted_products import adapt
from tandem.workers.models.compressed.decoder import HyperDecoder
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.decoder import DenseDecoder
from tandem.workers.models.dummy_weights import fill_randomly
from tandem.workers.models.parameters import DecoderParameters, allocate_parameters
from tandem.workers.models.scale_tensors import is_scale
from tandem.workers.models.sharding import slices_of
from tandem.workers.models.weight_names import named_weights
from tandem.workers.ranks.ranks import ALONE, Ranks
from tandem.workers.weights.allocator import DENSE, Form, Forms, Sketch
from tandem.workers.weights.formats.format import Quantization
from tandem.workers.weights.formats.registry import dummy_form_of, form_of, stored_weights
from tandem.workers.weights.weight import tensor_name

LOAD_FORMATS = ("safetensors", "dummy")
KEY_OR_VALUE = re.compile(r"model\.layers\.(\d+)\.self_attn\.[kv]_(?:proj|norm)\.")
EXPERT = re.compile(r"\.experts\.(\d+)\.")
BACKBONE, BARE = "model.", "layers.0."
READERS = 8  # threads: one copies from the page cache at a fraction of what memory, and a GPU's link, can take

META = torch.device("meta")
NO_ADAPTERS = AdapterSettings()

T = TypeVar("T")
ReportBytes = Callable[[int, int], None]
"""(bytes read, bytes in all)"""


def load_decoder(
    folder: Path,
    config: ModelConfig,
    *,
    load_format: str = "safetensors",
    device: torch.device | str = "cpu",
    report: ReportBytes | None = None,
    ranks: Ranks = ALONE,
    adapters: AdapterSettings = NO_ADAPTERS,
) -> DenseDecoder:
    """Loads a decoder with the parameters that load_parameters reads. ranks: of the config's shard. adapters: for
    which it has slots. Raises UnsupportedFeature where adapters cannot change the model."""
    decoder = DenseDecoder if config.hyper is None else HyperDecoder
    parameters = load_parameters(folder, config, load_format=load_format, device=device, report=report)
    if adapters.max_resident:
        parameters = adapt(config, parameters, adapters.max_resident, adapters.max_rank)
    return decoder(config, parameters, ranks=ranks)


def load_parameters(
    folder: Path,
    config: ModelConfig,
    *,
    load_format: str = "safetensors",
    device: torch.device | str = "cpu",
    report: ReportBytes | None = None,
) -> DecoderParameters:
    """Allocates and fills the parameters of `config` on `device`.

    load_format: "safetensors" reads the folder; "dummy" draws random weights, the same each time, and opens no file.
    Quantized weights stay so where there is a form for them, see Format.form. Others are dequantized to the model's
    dtype part by part. For that, each of the READERS threads takes at most stored.MAX_PART_BYTES. Raises
    CheckpointMissing, InvalidConfig and InvalidWeights.
    """
    config = config if load_format == "dummy" else _with_head(folder, config)
    parameters = load(folder, config, _whole_model(config), torch.device(device), load_format, report)
    if config.tie_word_embeddings and parameters.lm_head is not parameters.embedding:
        tied = parameters.embedding.slice(config.head_part.start, config.head_part.stop)
        if torch.equal(parameters.lm_head.tensor(), tied.tensor()):
            return dataclasses.replace(parameters, lm_head=parameters.embedding)
    return parameters


def stored_dtype(folder: Path) -> str | None:
    """The type in DTYPES of the first weight that has one, in the order of names in the first file: as transformers
    finds it. None without weights, and where none has one. Raises InvalidConfig and InvalidWeights."""
    try:
        path = weight_files(folder)[0]
    except CheckpointMissing:  # which is said when they are loaded, and dummy weights need none
        return None
    with SafetensorsFile(path) as file:
        stored = (STORED_DTYPES.get(file.tensors[name].dtype_name) for name in sorted(file.tensors))
    names = (str(dtype).removeprefix("torch.") for dtype in stored)
    return next((name for name in names if name in DTYPES), None)


def check_weights(folder: Path, config: ModelConfig) -> None:
    """Raises what load_parameters would raise for these files as they are, from their headers and sizes alone."""
    config = _with_head(folder, config)
    load(folder, config, _whole_model(config), META)


@dataclass(frozen=True)
class Blueprint(Generic[T]):
    """How parameters of one kind are allocated and named. Both calls get the names of the stored tensors."""

    allocate: Callable[[Collection[str], torch.device, Forms], T]
    named: Callable[[T, Collection[str]], dict[str, Tensor]]
    """See named_weights."""
    owns: Callable[[str], bool] = lambda name: True
    """Whether a tensor of the checkpoint is one of theirs."""
    may_lack_head: bool = False
    """See is_headless()."""


def load(
    folder: Path,
    config: ModelConfig,
    blueprint: Blueprint[T],
    device: torch.device,
    load_format: str = "safetensors",
    report: ReportBytes | None = None,
) -> T:
    """The filled parameters of a blueprint. On the meta device they are only checked. Raises as load_parameters."""
    if load_format not in LOAD_FORMATS:
        raise InvalidConfig(f"load_format is {load_format!r}; it must be one of {', '.join(LOAD_FORMATS)}")
    with ExitStack() as stack:
        dummy, stored = load_format == "dummy", dict[str, StoredWeight]()
        if not dummy:
            found = _stored(stack, folder, config, may_lack_head=blueprint.may_lack_head)
            stored = {name: one for name, one in found.items() if blueprint.owns(name)}
        sketch = Sketch()  # before any memory is taken
        weights = blueprint.named(_allocate(blueprint, stored, META, repeat(sketch)), stored)
        if not dummy:
            check_tensors(stored, weights, config)
        forms, kept = _choose_forms(sketch.matrices(weights), stored, config.quantization, dummy=dummy)
        parameters = _allocate(blueprint, stored, device, iter(forms))
        weights = blueprint.named(parameters, stored)
        if dummy:
            fill_randomly(config, weights)
        else:
            check_tensors(kept, weights, config)
            if device != META:
                _fill(kept, weights, config, device, report)
    return parameters


def _choose_forms(
    matrices: Iterable[tuple[Sequence[str], int]],
    stored: Mapping[str, StoredWeight],
    quantization: Quantization,
    *,
    dummy: bool,
) -> tuple[list[Form], dict[str, StoredWeight]]:
    """The form of each matrix, and what is stored for the tensors of matrices in these forms. matrices: see
    Sketch.matrices."""
    forms, kept = list[Form](), dict(stored)
    for names, columns in matrices:
        if dummy:
            forms.append(dummy_form_of(quantization, names))
            continue
        forms.append(form_of(quantization, [stored[name] for name in names], columns))
        if forms[-1] is not DENSE:
            for name in names:
                parts = kept.pop(name).kept()
                kept |= {tensor_name(name, kind): part for kind, part in parts.items()}
    return forms, kept


def _whole_model(config: ModelConfig) -> Blueprint[DecoderParameters]:
    """A head that is stored gets a weight of its own even where embeddings are to be tied: it may be another, and
    transformers then serves it."""

    def allocate(stored: Collection[str], device: torch.device, forms: Forms) -> DecoderParameters:
        _check_number(stored, config)
        own_head = config.lm_head_name in stored
        asked = dataclasses.replace(config, tie_word_embeddings=False) if own_head else config
        return allocate_parameters(asked, device, forms)

    return Blueprint(allocate, partial(named_weights, config), may_lack_head=True)


def _with_head(folder: Path, config: ModelConfig) -> ModelConfig:
    """The config with which all that is stored is used: a model without a head gets one of its embeddings."""
    if config.tie_word_embeddings or not (folder / "modules.json").is_file():
        return config
    with ExitStack() as stack:
        files = [stack.enter_context(SafetensorsFile(path)) for path in weight_files(folder)]
        headless = is_headless([name for file in files for name in file.tensors], config)
    return dataclasses.replace(config, tie_word_embeddings=True) if headless else config


def _fill(
    stored: Mapping[str, StoredWeight],
    weights: Mapping[str, Tensor],
    config: ModelConfig,
    device: torch.device,
    report: ReportBytes | None,
) -> None:
    total, done = sum(weight.nbytes for weight in weights.values()), 0
    report = report or (lambda done, total: None)
    report(done, total)
    parts = [
        part
        for name, weight in weights.items()
        for one in slices_of(name, weight, config, stored[name].shape)
        for part in stored[name].parts(one)
    ]
    parts.sort(key=lambda part: part.location)
    for filled in _read(parts, device):
        done += filled
        report(done, total)


def _read(parts: Iterable[WeightPart], device: torch.device) -> Iterator[int]:
    """Reads them side by side; the bytes that each has filled, in their order."""
    stagings = SimpleQueue[Tensor]()
    for _ in range(READERS):
        stagings.put(new_staging(device))

    def read(part: WeightPart) -> int:
        staging = stagings.get()
        try:
            return part.read(staging)
        finally:
            stagings.put(staging)

    with ThreadPoolExecutor(READERS, "weights") as readers:
        yield from readers.map(read, parts)


def _stored(stack: ExitStack, folder: Path, config: ModelConfig, *, may_lack_head: bool) -> dict[str, StoredWeight]:
    """The weights of a checkpoint, whose files are open for as long as `stack` is."""
    files = [stack.enter_context(SafetensorsFile(path)) for path in weight_files(folder)]
    found = stored_weights(files, config.quantization)
    if may_lack_head and is_headless(found, config):
        found = {f"{BACKBONE}{name}": weight for name, weight in found.items()}
    return {
        served_name(name, config): weight
        for name, weight in found.items()
        if not name.startswith(config.skipped_weights)
    }


def is_headless(names: Collection[str], config: ModelConfig) -> bool:
    """Whether the tensors belong to a model stored without its head, as embedding models are: their names lack a
    prefix."""
    own = config.hyper is None and any(name.startswith(BARE) for name in names)
    return own and not any(name.startswith((BACKBONE, config.lm_head_name)) for name in names)


def served_name(name: str, config: ModelConfig) -> str:
    """Returns the name that named_weights() gives a checkpoint's tensor."""
    prefix, stands_for = config.weight_prefix
    name = stands_for + name.removeprefix(prefix) if name.startswith(prefix) else name
    for pattern, stands_for in config.weight_renames:
        name = re.sub(pattern, stands_for, name)
    return name


def _allocate(blueprint: Blueprint[T], stored: Collection[str], device: torch.device, forms: Forms) -> T:
    try:
        return blueprint.allocate(stored, device, forms)
    except RuntimeError as error:
        raise InvalidWeights(f"config.json asks for tensors that are too large: {error!s:.200}") from None


def _check_number(stored: Collection[str], config: ModelConfig) -> None:
    """A config may ask for more tensors than there is memory for their names. InvalidWeights where the files have fewer
    than one for each layer and expert. Dummy weights have none."""
    experts = 0
    if config.moe is not None and not any(".experts.gate_up_proj" in name for name in stored):
        experts = len(config.moe.layers) * len(config.experts)
    if 0 < len(stored) < config.num_layers + experts:
        raise InvalidWeights(
            f"the checkpoint has {len(stored)} tensors; config.json asks for {config.num_layers} layers"
            + (f" with {experts} experts in all" if experts else "")
        )


def check_tensors(stored: Mapping[str, StoredWeight], weights: Mapping[str, Tensor], config: ModelConfig) -> None:
    """Each weight of the model is stored in its shape and in a type that can be read, and nothing unknown is."""
    for name, one in stored.items():
        weight = weights.get(name)
        if weight is not None and one.shape != (shape := slices_of(name, weight, config, one.shape)[0].stored_shape):
            raise InvalidWeights(
                f"{one.path}: tensor {name} has shape {list(one.shape)}; config.json asks for {list(shape)}"
            )
        if weight is not None and isinstance(one, Plain):
            dtype = one.file.dtype_of(one.name)  # raises where it is none that can be read
            if dtype.is_floating_point != weight.dtype.is_floating_point:
                raise InvalidWeights(f"{one.path}: tensor {name} has {dtype}; {config.architecture} has {weight.dtype}")
    missing = [name for name in weights if name not in stored]
    if missing:
        raise InvalidWeights(
            f"the checkpoint lacks {listing(missing)}, of {len(weights)} tensors of {config.architecture}"
        )
    unknown = [name for name in stored if name not in weights and not _is_ignored(name, config)]
    if unknown:
        raise InvalidWeights(f"the checkpoint has {listing(unknown)}, which {config.architecture} does not use")


def _is_ignored(name: str, config: ModelConfig) -> bool:
    """Whether the tensor follows from others, belongs to a layer or an expert that is not held here, or makes K or V of
    a layer that reads another's."""
    elsewhere = set(range(0 if config.moe is None else config.moe.num_experts)) - set(config.experts)
    return (
        is_scale(name)
        or name.endswith("rotary_emb.inv_freq")
        or name.startswith(config.extra_weights)
        or ((match := KEY_OR_VALUE.match(name)) is not None and int(match[1]) in config.readers)
        or ((match := EXPERT.search(name)) is not None and int(match[1]) in elsewhere)
    )
