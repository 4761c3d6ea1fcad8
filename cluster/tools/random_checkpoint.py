"""Random checkpoints with a tokenizer, in Hugging Face's files and names: for trying things, tests and benchmarks."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

from tandem.cache.plan.layout import DTYPES
from tandem.cluster.tools.sample_text import SENTENCES
from tandem.workers.checkpoint.errors import InvalidConfig
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.parameters import allocate_parameters
from tandem.workers.models.registry import load_config
from tandem.workers.models.weight_names import is_factor, is_norm, named_weights

BOS, EOS = "<|begin|>", "<|end|>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SHARD_BYTES = 5 << 30
EMBEDDING = ".embed_tokens.weight"
LOGITS_STD = 4  # about what trained models have: sampling at temperature 1 then has favourites


COMMON = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size",
          "vocab_size", "max_position_embeddings")  # fmt: skip
SIZES: dict[str, dict[str, int]] = {
    "tiny": dict(zip(COMMON, (2, 64, 4, 2, 176, 512, 2048), strict=True)),
    "small": dict(zip(COMMON, (4, 256, 8, 4, 688, 2048, 4096), strict=True)),
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
DEEPSEEK = {
    **EXPERTS,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
    "num_key_value_heads": None,
}
INDEXED = {"q_lora_rank": 48, "num_key_value_heads": 4, "index_n_heads": 8, "index_head_dim": 16, "index_topk": 64}
# What each family writes into config.json besides the common fields.
ARCHITECTURES: dict[str, dict[str, object]] = {
    "deepseek_v2": {
        "architectures": ["DeepseekV2ForCausalLM"],
        **DEEPSEEK,
        "q_lora_rank": None,
        "topk_method": "group_limited_greedy",
    },
    "deepseek_v3": {"architectures": ["DeepseekV3ForCausalLM"], **DEEPSEEK, "q_lora_rank": 48},
    "deepseek_v32": {"architectures": ["DeepseekV32ForCausalLM"], **DEEPSEEK, **INDEXED},
    "deepseek_v4": {
        "architectures": ["DeepseekV4ForCausalLM"],
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "partial_rotary_factor": 0.25,
        "q_lora_rank": 48,
        "o_groups": 2,
        "o_lora_rank": 32,
        "layer_types": [
            "sliding_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
            "compressed_sparse_attention",
        ],
        "num_hash_layers": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 64,
        "moe_intermediate_size": 64,
        "index_n_heads": 16,  # with 8, two of the scores of a query are both 0 now and then
        "index_head_dim": 16,
        "index_topk": 64,
        "rope_parameters": {kind: {**ROPE, "partial_rotary_factor": 0.25} for kind in ("main", "compress")},
    },
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 16,
        "sliding_window": 512,
    },
    "gemma3_text": {
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 16,
        "sliding_window": 512,
        "sliding_window_pattern": 2,
        "rope_parameters": {"full_attention": {**ROPE, "rope_theta": 1e6}, "sliding_attention": ROPE},
    },
    "gemma4": {
        "model_type": "gemma4_text",
        "architectures": ["Gemma4ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "global_head_dim": 32,
        "sliding_window": 512,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 2048,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            "sliding_attention": ROPE,
        },
    },
    "glm4_moe": {
        "architectures": ["Glm4MoeForCausalLM"],
        **EXPERTS,
        "use_qk_norm": True,
        "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
    },
    "glm4_moe_lite": {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        **DEEPSEEK,
        "q_lora_rank": 48,
        "num_key_value_heads": 4,
    },
    "glm_moe_dsa": {"architectures": ["GlmMoeDsaForCausalLM"], **DEEPSEEK, **INDEXED},
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 512,
    },
    "llama": {"architectures": ["LlamaForCausalLM"], "attention_bias": False, "mlp_bias": False},
    "llama4": {
        "model_type": "llama4_text",
        "architectures": ["Llama4ForCausalLM"],
        "head_dim": 16,
        "intermediate_size": 64,
        "intermediate_size_mlp": 176,
        "num_local_experts": 8,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 512,
        "no_rope_layer_interval": 2,
        "rope_parameters": {**ROPE, "rope_theta": 5e5},
    },
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": None},
    "mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2},
    "phi3": {"architectures": ["Phi3ForCausalLM"], "sliding_window": None, "pad_token_id": None},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "use_sliding_window": False},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    },
    "t5gemma": {"architectures": ["T5GemmaForConditionalGeneration"], "is_encoder_decoder": True},
}
# The families whose configs have an object for each half: what these write besides the common fields.
HALVES: dict[str, dict[str, object]] = {
    "t5gemma": {
        "model_type": "t5_gemma_module",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 16,
        "sliding_window": 512,
    }
}


def make_checkpoint(
    folder: Path,
    arch: str = "llama",
    size: str = "tiny",
    *,
    seed: int = 0,
    dtype: str = "float32",
    shard_bytes: int = SHARD_BYTES,
) -> ModelConfig:
    """Writes config.json, generation_config.json, weights (sharded beyond shard_bytes) and the tokenizer's files.

    The same arguments give the same weights. InvalidConfig for an unknown arch (ARCHITECTURES), size (SIZES) or dtype.
    """
    for name, value, known in (("arch", arch, ARCHITECTURES), ("size", size, SIZES), ("dtype", dtype, DTYPES)):
        if value not in known:
            raise InvalidConfig(f"{name} is {value!r}; it must be one of {', '.join(known)}")
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(SIZES[size]["vocab_size"])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(size))
    special = {"bos_token_id": tokenizer.token_to_id(BOS), "eos_token_id": tokenizer.token_to_id(EOS)}
    _write_json(folder / "generation_config.json", special)
    _write_json(folder / "config.json", {**_config(arch, size, dtype), **special})
    config = load_config(folder)
    # Views of fused rows are cloned: the library writes a storage once.
    weights = {name: tensor.clone() for name, tensor in random_weights(config, tokenizer, seed).items()}
    save_torch_state_dict(weights, folder, max_shard_size=shard_bytes)
    return config


def train_tokenizer(vocab_size: int) -> Tokenizer:
    """A byte-level BPE of at most vocab_size tokens, fewer when SENTENCES run out of pairs."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=0,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def random_weights(config: ModelConfig, tokenizer: Tokenizer, seed: int) -> dict[str, Tensor]:
    """Weights with varied and readable greedy output: only tokens that begin a word have logits apart from 0."""
    places = named_weights(config, allocate_parameters(config, torch.device("cpu")))
    generator = torch.Generator().manual_seed(seed)
    for name, place in places.items():
        if is_norm(name):
            place.fill_(1 - config.norm_offset)
        elif is_factor(name):
            place.fill_(1)
        elif place.dtype == torch.int64 and config.moe is not None:  # experts of each token
            experts = torch.rand(place.shape[0], config.moe.num_experts, generator=generator)
            place.copy_(experts.topk(place.shape[1]).indices)
        elif name.endswith("bias") or place.ndim == 1:
            place.normal_(0, 0.1, generator=generator)
        else:
            std = 1 / config.embedding_scale if name.endswith(EMBEDDING) else place.shape[1] ** -0.5
            place.normal_(0, std, generator=generator)
    spoken = [begins_word(tokenizer, token) for token in range(config.vocab_size)]
    places[config.lm_head_name].mul_(LOGITS_STD * torch.tensor(spoken)[:, None])
    return places


def begins_word(tokenizer: Tokenizer, token: int) -> bool:
    """Whether the token begins a word, so that any sequence of such tokens can be read."""
    text = tokenizer.decode([token])
    return text.startswith(" ") and text[1:].isalpha()


def _config(arch: str, size: str, dtype: str) -> dict[str, object]:
    sizes = SIZES[size]
    common: dict[str, object] = {
        **sizes,
        "model_type": arch,
        "head_dim": sizes["hidden_size"] // sizes["num_attention_heads"],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": ROPE,
        "tie_word_embeddings": False,
        "dtype": dtype,
    }
    if arch not in HALVES:
        return {**common, **ARCHITECTURES[arch]}
    whole = {name: common[name] for name in ("model_type", "vocab_size", "tie_word_embeddings", "dtype")}
    halves = {name: {**common, **HALVES[arch]} for name in ("encoder", "decoder")}
    return {**whole, **ARCHITECTURES[arch], **halves}


def _tokenizer_config(size: str) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "model_max_length": SIZES[size]["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
