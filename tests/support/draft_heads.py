"""Checkpoints with heads that draft, all random."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.checkpoints import make_model

VOCAB, DRAFT_VOCAB = 199, 60
MTP_NORMS = ("enorm", "hnorm", "shared_head.norm")
MTP_APART = "mtp.", "layers.0.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"), "fc"  # Qwen's names


def save_mtp(folder: Path, case: str = "deepseek_v3", **changes: Any) -> Path:
    """Saves a model of a case of `checkpoints`, with a layer for multi-token prediction like its last one. changes: of
    its configuration."""
    make_model(case, **changes).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    fields = json.loads((folder / "config.json").read_text())
    generator, count = torch.Generator().manual_seed(4), fields["num_hidden_layers"]

    def drawn(like: Tensor, scale: float = 1.0) -> Tensor:
        return torch.randn(like.shape, generator=generator) * scale

    apart = case.startswith(("qwen3_next", "qwen3_5"))
    root, layer, norms, join = MTP_APART if apart else (f"model.layers.{count}.", "", MTP_NORMS, "eh_proj")
    last = f"model.layers.{count - 1}."
    for name, tensor in list(tensors.items()):
        if name.startswith(last):
            own = root + layer + name.removeprefix(last)
            tensors[own] = 1 + drawn(tensor, 0.2) if tensor.dim() == 1 else drawn(tensor, 0.1)
    norm = tensors["model.norm.weight"]
    for name in norms:
        tensors[f"{root}{name}.weight"] = 1 + drawn(norm, 0.2)
    tensors[f"{root}{join}.weight"] = drawn(torch.empty(norm.numel(), 2 * norm.numel()), 0.2)
    if not apart:
        tensors[f"{root}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{root}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    number = "mtp_num_hidden_layers" if case.startswith("qwen3_5") else "num_nextn_predict_layers"
    (folder / "config.json").write_text(json.dumps(fields | {number: 1}))
    return folder


def save_eagle3(folder: Path, *, whole_vocab: bool, hidden: int = 64, head_dim: int = 16) -> dict[str, Tensor]:
    """Saves a head for llama-shaped targets of `COMMON`, or of these sizes. Returns its tensors."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(6)
    inner, rows = 48, {"q": 4 * head_dim, "k": 2 * head_dim, "v": 2 * head_dim}
    drafts = VOCAB if whole_vocab else DRAFT_VOCAB

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.15

    tensors = {f"midlayer.self_attn.{name}_proj.weight": drawn(count, 2 * hidden) for name, count in rows.items()}
    tensors |= {
        "midlayer.self_attn.o_proj.weight": drawn(hidden, 4 * head_dim),
        "midlayer.mlp.gate_proj.weight": drawn(inner, hidden),
        "midlayer.mlp.up_proj.weight": drawn(inner, hidden),
        "midlayer.mlp.down_proj.weight": drawn(hidden, inner),
        "fc.weight": drawn(hidden, 3 * hidden),
        "lm_head.weight": drawn(drafts, hidden),
    }
    norms = ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm")
    tensors |= {f"{name}.weight": 1 + drawn(hidden) for name in norms}
    if whole_vocab:
        tensors["embed_tokens.weight"] = drawn(VOCAB, hidden) * 5
    else:
        ids = torch.randperm(VOCAB, generator=generator)[:drafts].sort().values
        tensors["d2t"] = ids - torch.arange(drafts)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    fields = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "num_hidden_layers": 1,
        "vocab_size": VOCAB,
        "draft_vocab_size": drafts,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 3000.0,
    }
    (folder / "config.json").write_text(json.dumps(fields))
    return tensors
