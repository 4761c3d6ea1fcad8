"""Folders with a config.json of a real shape, for load_format dummy: random weights; a tokenizer where it is added."""

import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

DRAFT_VOCABULARY = 32_000  # of an EAGLE-3 head
COMMON = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1_000_000,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
SHAPES = {
    "qwen3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "tie_word_embeddings": True,
    },
    "qwen3-4b": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "tie_word_embeddings": True,
    },
    "qwen3-14b": {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_attention_heads": 40,
        "num_hidden_layers": 40,
        "tie_word_embeddings": False,
    },
}


SHAPES["qwen3-30b-a3b"] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
SHAPES["qwen3-next-8-layers"] = {  # of the 48 of Qwen3-Next-80B-A3B: two attend, six keep a state
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 8,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10_000_000,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FP8_SUFFIX = "-fp8"
SHAPES |= {f"{name}{FP8_SUFFIX}": SHAPES[name] | {"quantization_config": FP8} for name in ("qwen3-8b", "qwen3-30b-a3b")}


def shape_name(name: str) -> str:
    """The name in SHAPES that is meant: 8b is qwen3-8b."""
    return name if name in SHAPES else f"qwen3-{name}"


def write_shape(name: str, folder: Path) -> Path:
    """A folder in `folder` with the config.json of SHAPES[name]."""
    made = folder / name
    made.mkdir(parents=True, exist_ok=True)
    (made / "config.json").write_text(json.dumps(COMMON | SHAPES[name], indent=1) + "\n", encoding="utf-8")
    return made


def write_tiny(folder: Path) -> Path:
    """A folder in `folder` with a shape that a CPU serves."""
    made = folder / "tiny"
    made.mkdir(parents=True, exist_ok=True)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
    sizes |= {"head_dim": 16, "num_key_value_heads": 2, "vocab_size": 2048, "bos_token_id": 1, "eos_token_id": 2}
    config = COMMON | sizes | {"tie_word_embeddings": False, "torch_dtype": "float32"}
    (made / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return made


def add_tokenizer(model: Path) -> None:
    """A tokenizer with a word for each id of the model's vocabulary, so that servers make text of what they sample."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    words = {f"w{number}": number for number in range(config["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(model / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "eos_token": f"w{config['eos_token_id']}"}
    (model / "tokenizer_config.json").write_text(json.dumps(named) + "\n", encoding="utf-8")


def write_eagle3(name: str, folder: Path) -> Path:
    """A folder in `folder` with the config.json of an EAGLE-3 head for SHAPES[name], as published ones are: a layer of
    the target's sizes, and DRAFT_VOCABULARY tokens."""
    made = folder / f"{name}-eagle3"
    made.mkdir(parents=True, exist_ok=True)
    head = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": DRAFT_VOCABULARY,
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
    }
    (made / "config.json").write_text(json.dumps(COMMON | SHAPES[name] | head, indent=1) + "\n", encoding="utf-8")
    return made
