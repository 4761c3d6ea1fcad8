"""A format of weights in checkpoints, and how a config asks for it."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tandem.workers.checkpoint.errors import UnsupportedFeature
from tandem.workers.checkpoint.fields import SHOWN, Fields
from tandem.workers.checkpoint.stored import Plain, StoredWeight
from tandem.workers.weights.allocator import DENSE, Form

MAX_BLOCK = 1 << 16
BLOCK_SIZES = f"two integers from 1 to {MAX_BLOCK}"


@dataclass(frozen=True)
class Quantization:
    """The weights' and KV's quantization by quantization_config."""

    weights: str | None = None  # a key of FORMATS; None: they are stored as they are computed with
    block: tuple[int, int] | None = None  # rows and columns that share a scale, where a scale is of a block
    unquantized: tuple[str, ...] = ()  # modules that are stored as they are computed with, as the config names them
    fp8_kv: bool = False  # K and V are asked for in 8 bits
    zeros: bool = False  # integers have a zero of their own for each scale

    def leaves(self, name: str) -> bool:
        """Whether a weight belongs to one of `unquantized`: to the module, to one within it, or to one that an entry
        after `re:` matches. A star stands for anything."""
        module = name.removesuffix(".weight")
        return any(
            re.match(one.removeprefix("re:"), module) is not None
            if one.startswith("re:")
            else re.search(rf"\.{re.escape(one).replace(re.escape('*'), '.*')}\.", f".{module}.") is not None
            for one in self.unquantized
        )


AS_COMPUTED = Quantization()


@dataclass(frozen=True)
class Format:
    """One way to store some weights of a checkpoint."""

    find: Callable[[Mapping[str, Plain], Quantization], tuple[Mapping[str, StoredWeight], set[str]]]
    """The weights among the tensors, by the names that they have in `allocator`'s weights, and the names of the tensors
    that they are made of. Raises InvalidWeights."""
    form: Callable[[Sequence[StoredWeight], int], Form] = lambda parts, columns: DENSE
    """(the weights that fill a matrix, of its format or of another; its columns; each weight may have more, where
    ranks divide them) -> the form in which memory holds the matrix. DENSE: reading dequantizes. Raises
    InvalidWeights where ranks would divide what belongs together."""
    dummy: Callable[[Quantization], Form] = lambda quantization: DENSE
    """The form of random weights."""


@dataclass(frozen=True)
class Method:
    """A quant_method of quantization_config."""

    serves: str  # in an error's words
    read: Callable[[Fields, str], Quantization]
    """(quantization_config, what is served) -> its meaning. Raises InvalidConfig and UnsupportedFeature."""


def accept(section: Fields, name: str, accepted: tuple[object, ...], reason: str) -> None:
    """Raises UnsupportedFeature where the field has another value."""
    value = section.raw(name)
    if not any(type(value) is type(one) and value == one for one in accepted):
        shown, listed = SHOWN.repr(value), either(accepted)
        raise UnsupportedFeature(f"{section.source}: {name} is {shown}; it must be {listed}, for {reason}")


def either(accepted: tuple[object, ...]) -> str:
    return " or ".join(repr(one) for one in accepted if one is not None)


def read_modules(section: Fields, name: str) -> tuple[str, ...]:
    """Reads names of modules, or patterns. Raises InvalidConfig."""
    value = section.raw(name)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise section.invalid(name, "a list of names of modules")
    for one in value:
        if one.startswith("re:"):
            try:
                re.compile(one.removeprefix("re:"))
            except re.error:
                raise section.invalid(
                    name, "a list of names of modules, or of regular expressions behind re:"
                ) from None
    return tuple(value)


def read_block(section: Fields, name: str) -> tuple[int, int] | None:
    """Raises InvalidConfig."""
    value = section.raw(name)
    if value is None:
        return None
    sizes = value if isinstance(value, list) else []
    if len(sizes) != 2 or not all(type(size) is int and 1 <= size <= MAX_BLOCK for size in sizes):
        raise section.invalid(name, BLOCK_SIZES)
    return sizes[0], sizes[1]
