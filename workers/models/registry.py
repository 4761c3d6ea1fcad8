"""The families served, by the architecture that config.json names. A new one is a function and a row."""

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from tandem.cache.plan.layout import DTYPES
from tandem.workers.checkpoint.errors import CheckpointMissing, InvalidConfig, UnknownArchitecture
from tandem.workers.checkpoint.fields import Fields
from tandem.workers.checkpoint.files import is_there
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.families import (
    deepseek,
    deepseek_v4,
    gemma,
    gemma4,
    glm,
    gpt_oss,
    kimi_linear,
    llama,
    llama4,
    mistral,
    nemotron_h,
    phi3,
    qwen,
    qwen_next,
    seed_oss,
    t5gemma,
)
from tandem.workers.models.weights import stored_dtype

FAMILIES: Mapping[str, Callable[[Fields], ModelConfig]] = MappingProxyType(
    {
        "DeepseekV2ForCausalLM": deepseek.read_deepseek_v2,
        "DeepseekV3ForCausalLM": deepseek.read_deepseek_v3,
        "DeepseekV32ForCausalLM": deepseek.read_deepseek_v32,
        "DeepseekV4ForCausalLM": deepseek_v4.read_deepseek_v4,
        "Gemma2ForCausalLM": gemma.read_gemma2,
        "Gemma3ForCausalLM": gemma.read_gemma3,
        "Gemma4ForCausalLM": gemma4.read_gemma4,
        "Gemma4ForConditionalGeneration": gemma4.read_gemma4_of_images,
        "Glm4MoeForCausalLM": glm.read_glm4_moe,
        "Glm4MoeLiteForCausalLM": deepseek.read_glm4_moe_lite,
        "GlmMoeDsaForCausalLM": deepseek.read_glm_moe_dsa,
        "GptOssForCausalLM": gpt_oss.read_gpt_oss,
        "KimiLinearForCausalLM": kimi_linear.read_kimi_linear,
        "Llama4ForCausalLM": llama4.read_llama4,
        "Llama4ForConditionalGeneration": llama4.read_llama4_of_images,
        "LlamaForCausalLM": llama.read_llama,
        "MistralForCausalLM": mistral.read_mistral,
        "MixtralForCausalLM": mistral.read_mixtral,
        "NemotronHForCausalLM": nemotron_h.read_nemotron_h,
        "Phi3ForCausalLM": phi3.read_phi3,
        "Qwen2ForCausalLM": qwen.read_qwen2,
        "Qwen3ForCausalLM": qwen.read_qwen3,
        "Qwen3MoeForCausalLM": qwen.read_qwen3_moe,
        "Qwen3NextForCausalLM": qwen_next.read_qwen3_next,
        "Qwen3_5ForCausalLM": qwen_next.read_qwen3_5,
        "Qwen3_5ForConditionalGeneration": qwen_next.read_qwen3_5_of_images,
        "Qwen3_5MoeForCausalLM": qwen_next.read_qwen3_5_moe,
        "Qwen3_5MoeForConditionalGeneration": qwen_next.read_qwen3_5_moe_of_images,
        "SeedOssForCausalLM": seed_oss.read_seed_oss,
        "T5GemmaForConditionalGeneration": t5gemma.read_t5gemma,
    }
)

PARTS = ("text_config", "encoder", "decoder")  # of a config.json that is made of several


def load_config(folder: Path, dtype: str = "auto") -> ModelConfig:
    """config.json and generation_config.json of a checkpoint folder; raises ModelError.

    dtype: "auto" takes that of config.json, else that of the weights, as transformers does; else a name of
    tandem.cache.plan.layout.DTYPES. The end-of-sequence ids are those of generation_config.json where it has any, as
    in transformers' generate; end_tokens() adds the tokenizer's.
    """
    if not folder.is_dir():
        raise CheckpointMissing(f"model folder {folder} is not there; it must be a folder with config.json")
    fields = Fields.from_file(folder / "config.json")
    config = FAMILIES[_read_architecture(fields)](fields)
    if dtype == "auto" and not _names_dtype(fields):
        dtype = stored_dtype(folder) or dtype
    if dtype != "auto":
        if dtype not in DTYPES:
            raise InvalidConfig(f"dtype is {dtype!r}; it must be auto or one of {', '.join(DTYPES)}")
        config = dataclasses.replace(config, dtype=DTYPES[dtype])
        if config.encoder is not None:
            config = dataclasses.replace(config, encoder=dataclasses.replace(config.encoder, dtype=config.dtype))
    generation = folder / "generation_config.json"
    if is_there(generation):
        fields = Fields.from_file(generation)
        config = dataclasses.replace(config, eos_token_ids=fields.integers("eos_token_id") or config.eos_token_ids)
        starts = (*fields.integers("decoder_start_token_id"), *fields.integers("bos_token_id"))
        if config.encoder is not None and starts:
            config = dataclasses.replace(config, decoder_start_token_id=starts[0])
    return config


def _names_dtype(fields: Fields) -> bool:
    """Whether a dtype stands in config.json, or in its part about the text or a half of the model."""
    parts = [fields.section(name) for name in PARTS if isinstance(fields.raw(name), dict)]
    return any(name in part for part in (fields, *parts) for name in ("dtype", "torch_dtype"))


def _read_architecture(fields: Fields) -> str:
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
