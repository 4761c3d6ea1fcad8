"""Checkpoints whose drafts hold as often as is wanted, whoever drafts. Their layers are random, so that they take what
those of a real model take; embedding and head outweigh them.

Sampled at temperature 1, LIVE tokens follow one another in a ring: behind a token comes the next one of the ring with
probability √holds, or else any other of them. A prompt may have any tokens. So

- what stood behind a token before stands behind it again with probability holds, which prompt lookup drafts by,
- a drafter that is sure of the next one, and wrong behind a share 1 - √holds of all tokens, is right as often.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import log, sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.workers.models.config import ModelConfig
from tandem.workers.models.drafters.eagle3 import Eagle3Parameters, eagle3_config
from tandem.workers.models.drafters.mtp import MtpNames, MtpParameters, mtp_config
from tandem.workers.models.parameters import allocate_parameters
from tandem.workers.models.registry import load_config
from tandem.workers.models.weight_names import is_norm, layer_weights, named_weights
from tandem.workers.weights.allocator import ALL_DENSE
from tests.benchmarks.model_shapes import COMMON, SHAPES, add_tokenizer

FIRST_LIVE = 100  # token id
STD = 0.02  # of random weights
SURE = 30.0  # by which a sure token's logit exceeds the others
OUTWEIGHS = 4500.0  # what a token adds to the residual, beside which what layers add is small
DRAFT_SHAPE = {**COMMON, **SHAPES["qwen3-0.6b"], "tie_word_embeddings": False}
TINY_DRAFT = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1,
              "num_hidden_layers": 1}  # fmt: skip
META = torch.device("meta")
BLOCK = 1 << 25  # random numbers, of which all tensors are made
NAMES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.int64: "I64"}
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Ring:
    """size: LIVE tokens. follows: probability that the next of the ring comes. wrong: tokens of the ring behind which
    drafters that are models are wrong."""

    size: int
    follows: float
    wrong: int

    @classmethod
    def of(cls, config: ModelConfig, holds: float) -> "Ring":
        size = min(64, config.head_dim, config.hidden_size // 4)
        return cls(size, sqrt(holds), round(size * (1 - sqrt(holds))))

    def next(self, tokens: Tensor) -> Tensor:
        """Places in the ring, int64 [n], behind token ids."""
        return (tokens - FIRST_LIVE + 1) % self.size

    def drafted(self) -> Tensor:
        """Returns the place that is drafted for each place, int64 [size]; `wrong` of them, spread evenly, differ from
        their own."""
        drafted = torch.arange(self.size)
        places = torch.linspace(0, self.size - 1, self.wrong).long()
        drafted[places] = (places + self.size // 2 + 1) % self.size
        return drafted


def write_drafter(method: str, target: Path, folder: Path, holds: float) -> dict[str, Any]:
    """Keys of the configuration with which a cluster of this target drafts. Writes a drafter where the method has one
    of its own."""
    if method == "draft_model":
        return {"speculation.method": method, "speculation.draft": str(write_draft(target, folder / "draft", holds))}
    if method == "eagle3":
        head = write_eagle3_head(target, folder / "eagle3", holds)
        return {"speculation.method": method, "speculation.draft": str(head)}
    return {"speculation.method": method}


def write_target(config: Mapping[str, Any], folder: Path, holds: float) -> Path:
    """A checkpoint of this config.json in `folder`, which is made, with its layer for multi-token prediction if it has
    one."""
    _write_json(folder, {**config, "tie_word_embeddings": False})
    add_tokenizer(folder)
    read = load_config(folder)
    ring = Ring.of(read, holds)
    likely = log(ring.follows / (1 - ring.follows) * (ring.size - 1))
    weights = named_weights(read, allocate_parameters(read, META))
    special = _ends(read, ring, torch.arange(ring.size), likely)
    if read.num_extra_layers:
        more, own = _mtp(read, ring, SURE / likely)
        weights, special = weights | more, special | own
    _write(weights, special, folder, read.norm_offset)
    return folder


def write_draft(target: Path, folder: Path, holds: float) -> Path:
    """A small model with the target's vocabulary, which drafts for it."""
    wanted = load_config(target)
    given = DRAFT_SHAPE if wanted.hidden_size > 1024 else DRAFT_SHAPE | TINY_DRAFT | {"head_dim": 16}
    dtype = str(wanted.dtype).removeprefix("torch.")
    _write_json(folder, given | {"vocab_size": wanted.vocab_size, "torch_dtype": dtype})
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(target / file, folder)
    read = load_config(folder)
    ring = Ring.of(wanted, holds)
    special = _ends(read, ring, ring.drafted(), SURE)
    _write(named_weights(read, allocate_parameters(read, META)), special, folder)
    return folder


def write_eagle3_head(target: Path, folder: Path, holds: float) -> Path:
    """An EAGLE-3 head for the target. Each position attends to itself alone: its value is the next token's embedding,
    less what the residual has of the one before."""
    wanted = load_config(target)
    fields = json.loads((target / "config.json").read_text(encoding="utf-8"))
    kept = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
            "max_position_embeddings", "torch_dtype", "rms_norm_eps", "rope_theta")  # fmt: skip
    head = {name: fields[name] for name in kept} | {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
    drafts = min(32_000, wanted.vocab_size)
    _write_json(folder, head | {"num_hidden_layers": 1, "draft_vocab_size": drafts, "tie_word_embeddings": False})
    config, ring = eagle3_config(folder, wanted), Ring.of(wanted, holds)
    parameters, dtype = Eagle3Parameters(config, META, ALL_DENSE), wanted.dtype
    hidden, dim, live = config.hidden_size, config.head_dim, torch.arange(ring.size)
    entry = sqrt(hidden / 2)  # what the embedding has of a token, once it is normed
    q, k = torch.zeros((2, config.num_heads * dim, 2 * hidden), dtype=dtype)
    k = k[: config.num_kv_heads * dim].clone()
    q[: dim // 2, 0] = k[: dim // 2, 0] = sqrt(100 * sqrt(dim)) / entry  # the same at all positions, then rotated
    v = torch.zeros_like(k)
    v[live, 1 + live] = 1.0
    v[live, hidden + 1 + live] = -entry / sqrt(hidden)
    o = torch.zeros(hidden, config.num_heads * dim, dtype=dtype)
    o[1 + ring.drafted(), live] = OUTWEIGHS / entry
    lm_head = torch.zeros(drafts, hidden, dtype=dtype)
    lm_head[FIRST_LIVE + live, 1 + live] = SURE / sqrt(hidden)
    attention = "midlayer.self_attn"
    special: Tensors = {f"{attention}.{name}_proj.weight": one for name, one in zip("qkvo", (q, k, v, o), strict=True)}
    special |= {"lm_head.weight": lm_head, "fc.weight": torch.zeros(hidden, 3 * hidden, dtype=dtype)}
    weights = layer_weights(config, 0, parameters.layer, "midlayer", joined=False)
    weights |= {"midlayer.hidden_norm.weight": parameters.hidden_norm, "norm.weight": parameters.out_norm}
    weights |= {"d2t": torch.zeros(drafts, dtype=torch.int64)}
    special |= {"d2t": weights["d2t"]}
    _write(weights | special, special, folder)
    return folder


def _ends(config: ModelConfig, ring: Ring, drafted: Tensor, likely: float) -> Tensors:
    """Embedding and head. The first number of a hidden state is the same for all tokens, and keeps those that are not
    of the ring away; the next ones say which place of the ring follows. likely: by which its logit exceeds others."""
    hidden, dtype = config.hidden_size, config.dtype
    tokens, live = torch.arange(config.vocab_size), torch.arange(ring.size)
    embedding = torch.zeros(config.vocab_size, hidden, dtype=dtype)
    embedding[:, 0] = OUTWEIGHS
    embedding[tokens, 1 + drafted[ring.next(tokens)]] = OUTWEIGHS
    entry = sqrt(hidden / 2)
    some = torch.randn(1024, hidden, dtype=config.dtype) * (0.1 / sqrt(hidden))
    head = some.repeat(-(-config.vocab_size // 1024), 1)[: config.vocab_size]
    head[:, : 1 + ring.size] = 0.0
    head[:, 0] = -SURE / entry / 2
    head[FIRST_LIVE + live, 0] = SURE / entry / 2
    head[FIRST_LIVE + live, 1 + live] = likely / entry
    return {f"{config.weight_root}.embed_tokens.weight": embedding, config.lm_head_name: head}


def _mtp(target: ModelConfig, ring: Ring, more: float) -> tuple[Tensors, Tensors]:
    """The layer for multi-token prediction: all its weights, and those that are not random. more: times the target's
    logits."""
    config = mtp_config(target)
    parameters, names = MtpParameters(config, META, ALL_DENSE), MtpNames.of(target)
    hidden = config.hidden_size
    join = torch.zeros(hidden, 2 * hidden, dtype=config.dtype)
    live = torch.arange(ring.size)
    join[0, 0] = OUTWEIGHS / sqrt(hidden / 2)
    join[1 + ring.drafted(), 1 + live] = OUTWEIGHS / sqrt(hidden / 2)
    norm = torch.full((hidden,), more - config.norm_offset, dtype=parameters.out_norm.dtype)
    special = {f"{names.join}.weight": join, f"{names.out_norm}.weight": norm}
    return parameters.named(config, names) | special, special


def _write_json(folder: Path, config: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def _write(weights: Tensors, special: Tensors, folder: Path, norm_offset: float = 0.0) -> None:
    """One file, tensor by tensor: safetensors' own writer wants all of them in memory. norm_offset: of ModelConfig."""
    header, end = {}, 0
    for name, tensor in weights.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    random = torch.empty(BLOCK).normal_(0, STD, generator=torch.Generator().manual_seed(0))
    blocks = {dtype: random.to(dtype) for dtype in {tensor.dtype for tensor in weights.values()} - {torch.int64}}
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in weights.items():
            for part in _values(name, tensor, special, blocks, 1 - norm_offset):
                file.write(part.contiguous().view(torch.uint8).numpy().data)


def _values(
    name: str, tensor: Tensor, special: Tensors, blocks: Mapping[torch.dtype, Tensor], norm: float
) -> Iterator[Tensor]:
    """Parts of what is stored of the tensor, one after another. norm: of norms, each number."""
    if name in special:
        yield special[name].flatten()
    elif is_norm(name):
        yield torch.full((tensor.numel(),), norm, dtype=tensor.dtype)
    elif tensor.dim() == 1:
        yield torch.zeros(tensor.numel(), dtype=tensor.dtype)
    else:
        left, block = tensor.numel(), blocks[tensor.dtype]
        while left:
            yield block[:left]
            left -= min(left, block.numel())
