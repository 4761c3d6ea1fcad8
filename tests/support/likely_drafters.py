"""Models with a tokenizer, and drafters of each kind that are right most of the time.

Their layers add little to the embedding, so that a token follows from the last one nearly by itself. A drafter has
the embedding, too: its first layers' worth of attention decides the rest, sometimes otherwise than the target does.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tandem.cluster.tools.random_checkpoint import FAINT, OUTPUTS, make_checkpoint

ADDED = FAINT  # of what a random layer adds to its input
NUM_LAYERS = 8  # of the llama: EAGLE-3 takes three of 7 or more
HIDDEN, HEAD_DIM = 64, 16  # of both targets
SHARPNESS = 3.0  # of the head's attention: it sees its own position almost alone
Tensors = dict[str, Tensor]


def make_llama(folder: Path) -> Path:
    make_checkpoint(folder, "llama", seed=3)
    tensors, generator = _faint(_load(folder)), torch.Generator().manual_seed(8)
    for name, tensor in list(tensors.items()):
        for layer in range(2, NUM_LAYERS):
            if name.startswith("model.layers.1."):
                other = torch.randn(tensor.shape, generator=generator) * tensor.std() if tensor.dim() > 1 else tensor
                tensors[name.replace(".1.", f".{layer}.", 1)] = other.clone()
    _save(folder, tensors, num_hidden_layers=NUM_LAYERS)
    return folder


def make_mtp(folder: Path, arch: str = "glm4_moe") -> Path:
    """Makes a model with a layer for multi-token prediction."""
    make_checkpoint(folder, arch, seed=3, mtp=True)
    return folder


def make_smaller(folder: Path, target: Path) -> Path:
    """Makes a smaller model of the target's first two layers."""
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_text((target / name).read_text())
    layers = tuple(f"model.layers.{layer}." for layer in range(2, NUM_LAYERS))
    tensors = {name: tensor for name, tensor in _load(target).items() if not name.startswith(layers)}
    _save(folder, tensors, num_hidden_layers=2)
    return folder


def make_head(folder: Path, target: Path) -> Path:
    """Makes an EAGLE-3 head for make_llama's model. Each head of its attention passes on a slice of the next token's
    embedding."""
    folder.mkdir()
    of, generator = _load(target), torch.Generator().manual_seed(9)
    embedded, nothing = torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)
    sharp = torch.cat((SHARPNESS * embedded, nothing), 1)
    tensors = {
        "midlayer.self_attn.q_proj.weight": sharp,
        "midlayer.self_attn.k_proj.weight": sharp.clone(),
        "midlayer.self_attn.v_proj.weight": torch.cat((embedded, ADDED * embedded.roll(1, 0)), 1),
        "midlayer.self_attn.o_proj.weight": embedded.clone(),
        "fc.weight": ADDED * torch.randn(HIDDEN, 3 * HIDDEN, generator=generator) * HIDDEN**-0.5,
        "lm_head.weight": of["lm_head.weight"],
        "norm.weight": of["model.norm.weight"],
    }
    for name in ("gate_proj", "up_proj", "down_proj"):
        tensors[f"midlayer.mlp.{name}.weight"] = of[f"model.layers.0.mlp.{name}.weight"]
    for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        tensors[f"midlayer.{name}.weight"] = torch.ones(HIDDEN)
    fields = json.loads((target / "config.json").read_text()) | {"architectures": ["LlamaForCausalLMEagle3"]}
    heads = {"num_hidden_layers": 1, "num_attention_heads": HIDDEN // HEAD_DIM, "head_dim": HEAD_DIM}
    heads |= {"num_key_value_heads": HIDDEN // HEAD_DIM, "draft_vocab_size": fields["vocab_size"]}
    (folder / "config.json").write_text(json.dumps(fields))
    _save(folder, tensors, **heads)
    return folder


def _faint(tensors: Tensors) -> Tensors:
    """Scales output projections so that layers add little."""
    return {name: tensor * ADDED if name.endswith(OUTPUTS) else tensor for name, tensor in tensors.items()}


def _load(folder: Path) -> Tensors:
    return load_file(folder / "model.safetensors")


def _save(folder: Path, tensors: Tensors, **changes: Any) -> None:
    """Saves the model. changes: of config.json."""
    own = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}  # of which none shares memory
    save_file(own, folder / "model.safetensors", {"format": "pt"})
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
