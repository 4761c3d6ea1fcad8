"""Random checkpoints with a tokenizer, in Hugging Face's files and names: for trying things, tests and benchmarks."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

from tandem.cache.plan.layout import DTYPES
from tandem.cluster.tools.architectures import ARCHITECTURES, MTP_FIELDS, SIZES, config_fields
from tandem.cluster.tools.sample_text import SENTENCES
from tandem.workers.checkpoint.errors import InvalidConfig
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.drafters.mtp import MtpNames, MtpParameters, mtp_config
from tandem.workers.models.parameters import allocate_parameters
from tandem.workers.models.registry import load_config
from tandem.workers.models.weight_names import is_factor, is_norm, named_weights
from tandem.workers.weights.allocator import ALL_DENSE

BOS, EOS = "<|begin|>", "<|end|>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SHARD_BYTES = 5 << 30
EMBEDDINGS = (".embed_tokens.weight", ".embeddings.weight")
LOGITS_STD = 4  # as in trained models, about: sampling at temperature 1 then has favourites
FAINT = 0.15  # factor of what layers add to their input, so that a layer for multi-token prediction is right
OUTPUTS = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj")


def make_checkpoint(
    folder: Path,
    arch: str = "llama",
    size: str = "tiny",
    *,
    seed: int = 0,
    dtype: str = "float32",
    shard_bytes: int = SHARD_BYTES,
    mtp: bool = False,
) -> ModelConfig:
    """Writes config.json, generation_config.json, weights (sharded beyond shard_bytes) and the tokenizer's files.

    mtp: adds a layer for multi-token prediction, whose drafts hold most of the time: see add_mtp(). The same arguments
    give the same weights. InvalidConfig for an unknown arch (ARCHITECTURES), size (SIZES) or dtype, and for mtp with
    another arch than those of MTP_FIELDS.
    """
    for name, value, known in (("arch", arch, ARCHITECTURES), ("size", size, SIZES), ("dtype", dtype, DTYPES)):
        if value not in known:
            raise InvalidConfig(f"{name} is {value!r}; it must be one of {', '.join(known)}")
    if mtp and arch not in MTP_FIELDS:
        raise InvalidConfig(f"mtp is given with arch {arch!r}; arch must be one of {', '.join(MTP_FIELDS)}")
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(SIZES[size]["vocab_size"])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(size))
    special = {"bos_token_id": tokenizer.token_to_id(BOS), "eos_token_id": tokenizer.token_to_id(EOS)}
    _write_json(folder / "generation_config.json", special)
    _write_json(folder / "config.json", {**config_fields(arch, size, dtype, mtp=mtp), **special})
    config = load_config(folder)
    random = random_weights(config, tokenizer, seed)
    if mtp:
        add_mtp(config, random, seed)
    # Views of fused rows are cloned: the library writes a storage once.
    weights = {name: tensor.clone() for name, tensor in random.items()}
    save_torch_state_dict(weights, folder, max_shard_size=shard_bytes)
    return config


def train_tokenizer(vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE of at most vocab_size tokens, fewer when SENTENCES run out of pairs."""
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
    """Returns weights with varied and readable greedy output: only tokens that begin a word have logits apart from
    0."""
    places = named_weights(config, allocate_parameters(config, torch.device("cpu")))
    _fill(config, places, torch.Generator().manual_seed(seed))
    spoken = [begins_word(tokenizer, token) for token in range(config.vocab_size)]
    places[config.lm_head_name].mul_(LOGITS_STD * torch.tensor(spoken)[:, None])
    return places


def add_mtp(config: ModelConfig, weights: dict[str, Tensor], seed: int) -> None:
    """Adds a layer for multi-token prediction. All layers then add little to the embedding, so a token follows from the
    last token alone, nearly, which is what the layer passes on."""
    own, names, hidden = mtp_config(config), MtpNames.of(config), config.hidden_size
    layer = MtpParameters(own, torch.device("cpu"), ALL_DENSE).named(own, names)
    _fill(own, layer, torch.Generator().manual_seed(seed))
    embedding, state = torch.eye(hidden), FAINT * torch.eye(hidden).roll(1, 0)
    layer[f"{names.join}.weight"].copy_(torch.cat((embedding, state), 1))
    weights |= layer
    for name, weight in weights.items():
        if name.endswith(OUTPUTS):
            weight.mul_(FAINT)


def _fill(config: ModelConfig, places: Mapping[str, Tensor], generator: torch.Generator) -> None:
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
            std = 1 / config.embedding_scale if name.endswith(EMBEDDINGS) else place.shape[1] ** -0.5
            place.normal_(0, std, generator=generator)


def begins_word(tokenizer: Tokenizer, token: int) -> bool:
    """Returns whether the token begins a word, so that any sequence of such tokens can be read."""
    text = tokenizer.decode([token])
    return text.startswith(" ") and text[1:].isalpha()


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
