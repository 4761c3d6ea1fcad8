"""T5Gemma's tiny checkpoints, and what transformers generates from two prompts."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.cache.kernels.base import KernelFactory
from tandem.cache.kernels.choice import choose_kernels
from tandem.workers.models.registry import load_config
from tandem.workers.models.weights import load_decoder
from tandem.workers.runner.forward_graphs import Capture
from tandem.workers.runner.model_cache import kv_layout, make_cache
from tandem.workers.runner.model_runner import ModelRunner
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.sampling.sampling_params import SamplingParams
from tests.support.checkpoints import COMMON
from tests.support.tvm_cache import TvmCache
from tests.support.whole_prompts import compute_prompts

WINDOW, START, PAGE = 24, 1, 16
HALF: dict[str, Any] = {**COMMON, "sliding_window": WINDOW, "query_pre_attn_scalar": 24}


def save_t5gemma(folder: Path, encoder: dict[str, Any] | None = None, decoder: dict[str, Any] | None = None) -> Any:
    """Saves the model in float32, every parameter random. encoder, decoder: changes of these halves."""
    from transformers import T5GemmaConfig, T5GemmaForConditionalGeneration, T5GemmaModuleConfig

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
    from transformers import AutoModelForSeq2SeqLM

    return AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.inference_mode()
def greedy_behind(
    model: Any, encoder: Sequence[int], count: int, decoder: Sequence[int] = (), start: int = START, **options: Any
) -> list[int]:
    """`count` tokens, the end of sequence ignored, behind the encoder's prompt and what the decoder begins with.
    options: of generate."""
    ids, begin = torch.tensor([list(encoder)]), torch.tensor([[start, *decoder]])
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


class EncoderRunner:
    """A checkpoint's model over a paged cache. capture: with graphs of steps and verification, made by it."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: str = "auto",
        device: str = "cpu",
        kernels: KernelFactory = choose_kernels,
        capture: Capture | None = None,
    ) -> None:
        config = load_config(folder, dtype)
        layout = kv_layout(config, PAGE)
        pools = [
            torch.full((64, *layout.page_shape(group)), torch.nan, dtype=layout.dtype, device=device)
            for group in range(len(layout.groups))
        ]
        self.cache = TvmCache.of(make_cache(config, layout, pools, max_sequences=8, max_length=256, kernels=kernels))
        self.runner = ModelRunner(load_decoder(folder, config, device=torch.device(device)), self.cache)
        if capture is not None:
            self.runner.capture_steps(4, capture)
            self.runner.capture_verification(8, capture)
            assert self.runner.overlaps

    def prefill(self, prompts: Sequence[tuple[Sequence[int], Sequence[int]]], chunk: int = 64) -> Tensor:
        """Returns the logits after both prompts of sequences 0, 1, …: the encoder's, and the decoder's."""
        found = []
        for sequence, (encoder, decoder) in enumerate(prompts):
            padding = -len(encoder) % PAGE
            self.cache.add_sequence(sequence, len(encoder))
            ids = np.array([*encoder, *[0] * padding, *decoder], np.int64)
            ends = [*range(max(chunk, len(encoder) + padding), ids.size, chunk), ids.size]
            logits = None
            for begin, end in pairwise((0, *ends)):
                logits = compute_prompts(self.runner, [sequence], [ids[begin:end]], [ids.size], push=False)
            assert logits is not None
            found.append(logits[-1])
        return torch.stack(found)

    def steps(self, tokens: list[int], count: int) -> list[list[int]]:
        """Returns so many greedy tokens of each sequence, after tokens[i] of sequence i."""
        rows, found = list(range(len(tokens))), [tokens]
        for _ in range(count):
            sampling = SampleBatch.from_params([SamplingParams(temperature=0)] * len(rows))
            ids, sources = np.array(found[-1], np.int64), np.full(len(rows), -1)
            positions = np.array([self.cache.num_tokens(row) + 1 for row in rows], np.int64)
            pending = self.runner.step(rows, ids, sources, sampling, positions)
            found.append(pending.wait().token_ids.tolist())
        return [list(one) for one in zip(*found[1:], strict=True)]

    def verify(self, tokens: list[list[int]]) -> list[int]:
        """Returns the token that follows each of tokens[i], the next tokens of sequence i."""
        rows = list(range(len(tokens)))
        sampling = SampleBatch.from_params([SamplingParams(temperature=0)] * len(rows))
        positions = np.array([self.cache.num_tokens(row) + 1 for row in rows], np.int64)
        ids = [np.array(one, np.int64) for one in tokens]
        return self.runner.verify(rows, ids, sampling, positions).wait().token_ids.tolist()
