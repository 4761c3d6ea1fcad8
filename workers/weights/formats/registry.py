"""All formats of weights: which config asks for which, and the weights that a checkpoint's files have in them."""

from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any

from tandem.workers.checkpoint import quantizations
from tandem.workers.checkpoint.errors import InvalidWeights
from tandem.workers.checkpoint.fields import Fields
from tandem.workers.checkpoint.safetensors_file import SafetensorsFile
from tandem.workers.checkpoint.stored import Plain, StoredWeight
from tandem.workers.weights.allocator import DENSE, Form
from tandem.workers.weights.formats.format import AS_COMPUTED, Format, Method, Quantization


def _named(name: str) -> Any:
    """Returns the attribute `module.NAME` of this package."""
    module, _, attribute = name.partition(".")
    return getattr(import_module(f"tandem.workers.weights.formats.{module}"), attribute)


METHODS: dict[str, Method] = {method: _named(name) for method, name in quantizations.METHODS.items()}
FORMATS: dict[str, tuple[Format, ...]] = {
    weights: tuple(map(_named, names)) for weights, names in quantizations.FORMATS.items()
}
ACTIVATION_SCALES = (".input_scale", ".activation_scale")  # activations are not rounded here


def read_quantization(fields: Fields) -> Quantization:
    """quantization_config. Raises InvalidConfig, and UnsupportedFeature where it asks for something else."""
    if "quantization_config" not in fields:
        return AS_COMPUTED
    section = fields.section("quantization_config")
    *others, last = (one.serves for one in METHODS.values())
    served = f"weights are served in {', '.join(others)} and {last}"
    return METHODS[quantizations.read_method(section)].read(section, served)


def form_of(quantization: Quantization, parts: Sequence[StoredWeight], columns: int) -> Form:
    """See Format.form."""
    formats = () if quantization.weights is None else FORMATS[quantization.weights]
    chosen = (one.form(parts, columns) for one in formats)
    return next((form for form in chosen if form is not DENSE), DENSE)


def dummy_form_of(quantization: Quantization, names: Sequence[str]) -> Form:
    """names: of the tensors that would fill the matrix."""
    if quantization.weights is None or any(quantization.leaves(name) for name in names):
        return DENSE
    return FORMATS[quantization.weights][0].dummy(quantization)


def stored_weights(files: Iterable[SafetensorsFile], quantization: Quantization) -> dict[str, StoredWeight]:
    """The weights in the files, by the names that they have where nothing is quantized. Raises InvalidWeights."""
    plain: dict[str, Plain] = {}
    for file in files:
        for name in file.tensors:
            if name in plain:
                raise InvalidWeights(f"{file.path}: tensor {name} is in another file, too; it must be in one")
            plain[name] = Plain(file, name)
    if quantization.weights is None:
        return dict(plain)
    found: dict[str, StoredWeight] = {}
    used = {name for name in plain if name.endswith(ACTIVATION_SCALES)}
    for one in FORMATS[quantization.weights]:
        weights, parts = one.find(plain, quantization)
        found |= weights
        used |= parts
    if plain and not found:
        raise InvalidWeights(
            f"config.json: quantization_config asks for weights in {quantization.weights}, and no tensor is stored so; "
            "leave it out where the weights are not quantized"
        )
    others: dict[str, StoredWeight] = {name: one for name, one in plain.items() if name not in used}
    return others | found
