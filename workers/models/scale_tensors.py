"""The scales of an FP8 KV cache as checkpoints carry them: a tensor for K and one for V of each layer.

llm-compressor writes `model.layers.0.self_attn.k_scale`, ModelOpt `…self_attn.k_proj.k_scale`; a model saved from an
engine has `…self_attn.attn.k_scale`. One number for the layer, or one for each KV head. Scales of q are not read:
queries are not rounded here.
"""

import math
import re
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import torch

from tandem.cache.plan.kv_scales import KVScales
from tandem.workers.checkpoint.errors import InvalidWeights
from tandem.workers.checkpoint.safetensors_file import SafetensorsFile, Slice, new_staging
from tandem.workers.models.config import ModelConfig

_NAME = re.compile(r"(?:language_model\.)?model\.layers\.(\d+)\.self_attn\.(?:attn\.|([qkv])_proj\.)?([qkv])_scale")


def is_scale(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def read_scales(paths: Iterable[Path], config: ModelConfig) -> KVScales | None:
    """The scales in safetensors files; None when there are none. InvalidWeights when some layers lack theirs."""
    found: dict[tuple[str, int], tuple[float, ...]] = {}
    with ExitStack() as stack:
        for file in [stack.enter_context(SafetensorsFile(path)) for path in paths]:
            for name in file.tensors:
                match = _NAME.fullmatch(name)
                if match is not None and match[3] != "q":
                    found[match[3], int(match[1])] = _read(file, name, config)
    if not found:
        return None
    layers = range(config.num_layers)
    missing = [f"{which}_scale of layer {layer}" for layer in layers for which in "kv" if (which, layer) not in found]
    if missing:
        raise InvalidWeights(
            f"the checkpoint has scales for its KV cache but lacks {missing[0]}, {len(missing)} in all; "
            "every layer must have both"
        )
    return KVScales(tuple(found["k", layer] for layer in layers), tuple(found["v", layer] for layer in layers))


def _read(file: SafetensorsFile, name: str, config: ModelConfig) -> tuple[float, ...]:
    """Reads the scale of the layer, or the scales of the shard's KV heads."""
    shape, num_kv_heads = file.tensors[name].shape, config.num_kv_heads * config.shard.size // config.kv_replicas
    if math.prod(shape) not in (1, num_kv_heads):
        raise InvalidWeights(
            f"{file.path}: tensor {name} has {math.prod(shape)} numbers; it must have 1 for the layer or "
            f"{num_kv_heads}, one a KV head"
        )
    scales = torch.empty(shape)
    for part in file.parts(name, Slice(scales)):
        part.read(new_staging("cpu"))
    if scales.numel() > 1:
        heads = config.shard.kv_heads("num_kv_heads", num_kv_heads)
        scales = scales.view(-1)[heads.start : heads.stop]
    return tuple(scales.view(-1).tolist())
