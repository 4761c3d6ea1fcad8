"""The windows of a model's layers, as Hugging Face configs write them, and their chunks."""

from dataclasses import dataclass

from tandem.cache.plan.temperature import Temperature
from tandem.workers.checkpoint.errors import UnsupportedFeature
from tandem.workers.checkpoint.fields import Fields

DEFAULT_SIZE = 4096  # of a config that has a window but does not say which, as in transformers
FIRST_LAYER = 28  # of a config that does not give max_window_layers, as in transformers
SLIDING = "sliding_attention"


@dataclass(frozen=True)
class Windows:
    """The windows of a family's layers."""

    size: int | None  # positions; None: no layer has a window
    first: int = 0  # the first layer with a window, where layer_types is absent
    full_every: int | None = None  # each so-many-th layer has none, where layer_types is absent
    typed: bool = True  # layer_types counts where it is given; in transformers some families do not read it


NO_WINDOWS = Windows(None)


@dataclass(frozen=True)
class ChunkedConfig:
    """Layers that rotate and attend in chunks, among others that see all and rotate nothing (Llama 4). Checkpoints
    store the rotated numbers of a head as neighbours."""

    size: int  # positions of a chunk
    layers: frozenset[int]  # those with RoPE and chunks
    qk_norm: bool  # q and k of these are normalised per head, without a weight
    temperature: Temperature | None  # of q in the others


def read_size(fields: Fields, default: int = DEFAULT_SIZE) -> int | None:
    """sliding_window; None when it is null. Absent is not null: transformers then takes a default."""
    if "sliding_window" in fields.names() and fields.raw("sliding_window") is None:
        return None
    return fields.integer("sliding_window", default, minimum=1)


def read_optional_size(fields: Fields) -> int | None:
    """sliding_window of the families that have none when it is absent."""
    return fields.integer("sliding_window", minimum=1) if "sliding_window" in fields else None


def read_late_windows(fields: Fields) -> Windows:
    """Reads Qwen's windows: use_sliding_window, and the first such layer."""
    if not fields.boolean("use_sliding_window", False):
        return NO_WINDOWS
    return Windows(read_size(fields), first=fields.integer("max_window_layers", FIRST_LAYER))


def read_layer_windows(fields: Fields, windows: Windows) -> tuple[int | None, ...] | None:
    """ModelConfig.layer_windows: the window for the layers that layer_types calls sliding_attention.

    Raises InvalidConfig, and UnsupportedFeature for other kinds of layers.
    """
    num_layers = fields.integer("num_hidden_layers", minimum=1)
    kinds = fields.raw("layer_types") if windows.typed else None
    if kinds is None:
        kinds = _kinds(windows, num_layers)
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise fields.invalid("layer_types", f"a list of {num_layers}, num_hidden_layers")
    other = sorted({str(kind) for kind in kinds} - {"full_attention", SLIDING})
    if other:
        raise UnsupportedFeature(
            f"{fields.source}: layer_types has {', '.join(other)}; the cache has no such layers yet"
        )
    if SLIDING not in kinds:
        return None
    if windows.size is None:
        raise UnsupportedFeature(f"{fields.source}: layer_types has {SLIDING}, but no sliding_window is in effect")
    return tuple(windows.size if kind == SLIDING else None for kind in kinds)


def _kinds(windows: Windows, num_layers: int) -> list[str]:
    every = windows.full_every
    slides = (layer >= windows.first and (every is None or (layer + 1) % every) for layer in range(num_layers))
    return [SLIDING if windows.size is not None and one else "full_attention" for one in slides]
