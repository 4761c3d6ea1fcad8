"""T5Gemma's tiny checkpoints, and what transformers generates from two prompts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSeq2SeqLM, T5GemmaConfig, T5GemmaForConditionalGeneration, T5GemmaModuleConfig

from tests.support.checkpoints import COMMON

WINDOW, START = 24, 1
HALF: dict[str, Any] = {**COMMON, "sliding_window": WINDOW, "query_pre_attn_scalar": 24}


def save_t5gemma(folder: Path, encoder: dict[str, Any] | None = None, decoder: dict[str, Any] | None = None) -> Any:
    """The model in float32, every parameter random. encoder, decoder: changes of these halves."""
    halves = [T5GemmaModuleConfig(**{**HALF, **(changes or {})}) for changes in (encoder, decoder)]
    config = T5GemmaConfig(encoder=halves[0], decoder=halves[1], vocab_size=COMMON["vocab_size"])
    model = T5GemmaForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = name.endswith("norm.weight")
            parameter.normal_(0, 0.3 if is_norm else 0.15, generator=generator)
    model.save_pretrained(folder)
    return load_t5gemma(folder)


def load_t5gemma(folder: Path) -> Any:
    return AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.inference_mode()
def greedy_behind(
    model: Any, encoder: Sequence[int], count: int, decoder: Sequence[int] = (), **options: Any
) -> list[int]:
    """`count` tokens, the end of sequence ignored, behind the encoder's prompt and what the decoder begins with.
    options: of generate."""
    ids, begin = torch.tensor([list(encoder)]), torch.tensor([[START, *decoder]])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        decoder_input_ids=begin,
        decoder_attention_mask=torch.ones_like(begin),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        **options,
    )
    return output[0, begin.shape[1] :].tolist()
