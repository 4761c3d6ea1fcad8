"""The architectures that are served, by config.json's names. It needs no torch: an unknown one is refused at once."""

from collections.abc import Mapping
from types import MappingProxyType

from tandem.workers.checkpoint.errors import UnknownArchitecture
from tandem.workers.checkpoint.fields import Fields

# The function of tandem.workers.models.families that reads each one's config.json.
FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        "DeepseekV2ForCausalLM": "deepseek.read_deepseek_v2",
        "DeepseekV3ForCausalLM": "deepseek.read_deepseek_v3",
        "DeepseekV32ForCausalLM": "deepseek.read_deepseek_v32",
        "DeepseekV4ForCausalLM": "deepseek_v4.read_deepseek_v4",
        "Gemma2ForCausalLM": "gemma.read_gemma2",
        "Gemma3ForCausalLM": "gemma.read_gemma3",
        "Gemma4ForCausalLM": "gemma4.read_gemma4",
        "Gemma4ForConditionalGeneration": "gemma4.read_gemma4_of_images",
        "Glm4MoeForCausalLM": "glm.read_glm4_moe",
        "Glm4MoeLiteForCausalLM": "deepseek.read_glm4_moe_lite",
        "GlmMoeDsaForCausalLM": "deepseek.read_glm_moe_dsa",
        "GptOssForCausalLM": "gpt_oss.read_gpt_oss",
        "KimiLinearForCausalLM": "kimi_linear.read_kimi_linear",
        "Llama4ForCausalLM": "llama4.read_llama4",
        "Llama4ForConditionalGeneration": "llama4.read_llama4_of_images",
        "LlamaForCausalLM": "llama.read_llama",
        "MistralForCausalLM": "mistral.read_mistral",
        "MixtralForCausalLM": "mistral.read_mixtral",
        "NemotronHForCausalLM": "nemotron_h.read_nemotron_h",
        "Phi3ForCausalLM": "phi3.read_phi3",
        "Qwen2ForCausalLM": "qwen.read_qwen2",
        "Qwen3ForCausalLM": "qwen.read_qwen3",
        "Qwen3MoeForCausalLM": "qwen.read_qwen3_moe",
        "Qwen3NextForCausalLM": "qwen_next.read_qwen3_next",
        "Qwen3_5ForCausalLM": "qwen_next.read_qwen3_5",
        "Qwen3_5ForConditionalGeneration": "qwen_next.read_qwen3_5_of_images",
        "Qwen3_5MoeForCausalLM": "qwen_next.read_qwen3_5_moe",
        "Qwen3_5MoeForConditionalGeneration": "qwen_next.read_qwen3_5_moe_of_images",
        "SeedOssForCausalLM": "seed_oss.read_seed_oss",
        "T5GemmaForConditionalGeneration": "t5gemma.read_t5gemma",
    }
)


def read_architecture(fields: Fields) -> str:
    """A key of FAMILIES. Raises InvalidConfig, UnknownArchitecture."""
    names = fields.raw("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise fields.invalid("architectures", f"a list with one of {', '.join(FAMILIES)}")
    with_head = names[0].removesuffix("Model") + "ForCausalLM"  # embedding models are stored without a head
    served = next((name for name in (names[0], with_head) if name in FAMILIES), None)
    if served is not None:
        return served
    raise UnknownArchitecture(
        f"{fields.source}: architecture {names[0]:.100} is not served. Served: {', '.join(FAMILIES)}"
    )
