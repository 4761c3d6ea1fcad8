"""The weights of a checkpoint: tensors as they are, or quantized ones that are dequantized part by part."""

from collections.abc import Iterable, Iterator, Mapping

from tandem.workers.checkpoint.errors import InvalidWeights
from tandem.workers.checkpoint.fp4 import fp4_weights
from tandem.workers.checkpoint.fp8 import fp8_weights
from tandem.workers.checkpoint.mxfp4 import mxfp4_weights
from tandem.workers.checkpoint.quantization import Quantization
from tandem.workers.checkpoint.safetensors_file import SafetensorsFile
from tandem.workers.checkpoint.stored import Plain, StoredWeight

ACTIVATION_SCALES = (".input_scale", ".activation_scale")  # activations are not rounded here


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
    used = set[str]()
    for weights, scales in _quantized(plain, quantization):
        found |= weights
        used |= scales
    used |= {name for name in plain if name.endswith(ACTIVATION_SCALES)}
    others: dict[str, StoredWeight] = {name: one for name, one in plain.items() if name not in used}
    return others | found


def _quantized(
    plain: Mapping[str, Plain], quantization: Quantization
) -> Iterator[tuple[Mapping[str, StoredWeight], set[str]]]:
    """By name, and the names of what they are stored in beside."""
    if quantization.weights == "mxfp4":
        yield mxfp4_weights(plain)
    else:
        yield fp8_weights(plain, quantization)
        yield fp4_weights(plain)
