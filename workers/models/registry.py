"""The families served, by the architecture that config.json names. A new dense family is one file and one row."""

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from tandem.cache.plan.layout import DTYPES
from tandem.workers.checkpoint.errors import CheckpointMissing, InvalidConfig, UnknownArchitecture
from tandem.workers.checkpoint.fields import Fields
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.families import (
    deepseek_v2,
    deepseek_v3,
    gemma2,
    gemma3,
    gpt_oss,
    llama,
    mistral,
    mixtral,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
)

FAMILIES: Mapping[str, Callable[[Fields], ModelConfig]] = MappingProxyType(
    {
        "DeepseekV2ForCausalLM": deepseek_v2.read_config,
        "DeepseekV3ForCausalLM": deepseek_v3.read_config,
        "Gemma2ForCausalLM": gemma2.read_config,
        "Gemma3ForCausalLM": gemma3.read_config,
        "GptOssForCausalLM": gpt_oss.read_config,
        "LlamaForCausalLM": llama.read_config,
        "MistralForCausalLM": mistral.read_config,
        "MixtralForCausalLM": mixtral.read_config,
        "Phi3ForCausalLM": phi3.read_config,
        "Qwen2ForCausalLM": qwen2.read_config,
        "Qwen3ForCausalLM": qwen3.read_config,
        "Qwen3MoeForCausalLM": qwen3_moe.read_config,
    }
)


def load_config(folder: Path, dtype: str = "auto") -> ModelConfig:
    """config.json and generation_config.json of a checkpoint folder; raises ModelError.

    dtype: "auto" takes the checkpoint's, else a name of tandem.cache.plan.layout.DTYPES. The end-of-sequence ids are
    those of generation_config.json where it has any, as in transformers' generate.
    """
    if not folder.is_dir():
        raise CheckpointMissing(f"model folder {folder} is not there; it must be a folder with config.json")
    fields = Fields.from_file(folder / "config.json")
    config = FAMILIES[read_architecture(fields)](fields)
    if dtype != "auto":
        if dtype not in DTYPES:
            raise InvalidConfig(f"dtype is {dtype!r}; it must be auto or one of {', '.join(DTYPES)}")
        config = dataclasses.replace(config, dtype=DTYPES[dtype])
    generation = folder / "generation_config.json"
    if generation.exists():
        eos = Fields.from_file(generation).integers("eos_token_id")
        config = dataclasses.replace(config, eos_token_ids=eos or config.eos_token_ids)
    return config


def read_architecture(fields: Fields) -> str:
    names = fields.raw("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise fields.invalid("architectures", f"a list with one of {', '.join(FAMILIES)}")
    if names[0] in FAMILIES:
        return names[0]
    near = difflib.get_close_matches(names[0], FAMILIES, n=1)
    hint = f"; the nearest is {near[0]}" if near else ""
    raise UnknownArchitecture(
        f"{fields.source}: architecture {names[0]} is not known{hint}. Known: {', '.join(FAMILIES)}"
    )
