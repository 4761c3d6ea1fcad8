"""Tokens that transformers generates: greedy, float32, without padding."""

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel

DYNAMIC = ("dynamic", "longrope")


def load_oracle(
    folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu", **options: Any
) -> "PreTrainedModel":
    """Loads the model. options: of from_pretrained."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager", **options)
    _clamp_as_configured(model)
    return model.eval().to(device)


def _clamp_as_configured(model: "PreTrainedModel") -> None:
    """Clamps gpt_oss's experts at swiglu_limit: transformers 5.17 clamps them at 7, later versions at swiglu_limit."""
    limit = getattr(model.config, "swiglu_limit", None)
    for module in model.modules():
        if limit is not None and hasattr(module, "limit"):
            module.limit = limit


def in_its_precision(model: "PreTrainedModel") -> torch.autocast:
    """Runs its forwards in 16 bits under autocast, because transformers 5.17 mixes DeepSeek-V4's dtypes."""
    mixes = model.config.model_type == "deepseek_v4" and model.dtype != torch.float32
    return torch.autocast(model.device.type, model.dtype if mixes else None, enabled=mixes)


def greedy(
    model: "PreTrainedModel", prompt: Sequence[int], num_tokens: int, cache: "DynamicCache | None" = None
) -> list[int]:
    """Generates num_tokens tokens and ignores the end of sequence. cache: an empty cache of another kind than
    transformers' own."""
    return _generate(model, [prompt], num_tokens, cache)[0]


@torch.inference_mode()
def likeliest(model: "PreTrainedModel", prompt: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """Returns the likeliest token after the prompt and after each of `tokens` but the last. If they equal `tokens`,
    these are greedy(): that takes one forward, and not one for each token."""
    ids = torch.tensor([[*prompt, *tokens[:-1]]], device=model.device)
    return model(ids).logits[0, len(prompt) - 1 :].argmax(1).tolist()


def greedy_all(model: "PreTrainedModel", prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """greedy of each prompt. Those of one length are a batch, for they need no padding.

    Each batch of a model with dynamic RoPE has a copy: that remembers the longest sequence that it has seen.
    """
    kinds = [str(getattr(module, "rope_type", "")) for module in model.modules()]  # or one for each kind of layer
    remembers = any(kind in one for one in kinds for kind in DYNAMIC)
    rows_of: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompts):
        rows_of.setdefault(len(prompt), []).append(row)
    tokens: dict[int, list[int]] = {}
    for rows in rows_of.values():
        batch = _generate(deepcopy(model) if remembers else model, [prompts[row] for row in rows], num_tokens, None)
        tokens |= zip(rows, batch, strict=True)
    return [tokens[row] for row in range(len(prompts))]


@torch.inference_mode()
def _generate(
    model: "PreTrainedModel", prompts: Sequence[Sequence[int]], num_tokens: int, cache: "DynamicCache | None"
) -> list[list[int]]:
    """prompts: of one length."""
    ids = torch.tensor([list(prompt) for prompt in prompts], device=model.device)
    output = model.generate(  # type: ignore[operator]  # pyright takes it for a tensor
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        past_key_values=cache,
    )
    return output[:, ids.shape[1] :].tolist()


def random_prompt(length: int, seed: int, vocab_size: int = 199) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab_size, (length,), generator=generator).tolist()
