"""A model with random LoRA adapters over a paged cache, without a worker around it: prompts and steps of sequences."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tandem.cache.attention.forward import Batch
from tandem.cache.kernels.base import KernelFactory
from tandem.cache.kernels.choice import choose_kernels
from tandem.workers.config import AdapterSettings
from tandem.workers.models.registry import load_config
from tandem.workers.models.weights import load_decoder
from tandem.workers.runner.model_cache import kv_layout, make_cache
from tandem.workers.runner.model_runner import ModelRunner
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.sampling.sampling_params import SamplingParams
from tests.support.adapters import held_adapters, random_adapters
from tests.support.tvm_cache import TvmCache
from tests.support.whole_prompts import compute_prompts

PAGE, LONGEST, MOST = 16, 256, 24


class AdaptedModel:
    """Holds adapters; as many as there are slots are on the device."""

    def __init__(
        self,
        folder: Path,
        adapters: Path | Sequence[Path],
        *,
        slots: int,
        count: int = 0,
        rank: int = 16,
        dtype: str = "float32",
        device: str = "cpu",
        kernels: KernelFactory = choose_kernels,
    ) -> None:
        """adapters: their folders, or a folder for `count` random ones, which are alike in each model."""
        config = load_config(folder, dtype)
        settings, layout = AdapterSettings(slots, rank), kv_layout(config, PAGE)
        decoder = load_decoder(folder, config, device=device, adapters=settings)
        assert decoder.adapted is not None
        pools = [
            torch.zeros(
                (MOST * LONGEST // PAGE, *layout.page_shape(group)), dtype=layout.stored_dtype_of(group), device=device
            )
            for group in range(len(layout.groups))
        ]
        self.cache = TvmCache.of(
            make_cache(config, layout, pools, max_sequences=MOST, max_length=LONGEST, kernels=kernels)
        )
        folders = random_adapters(decoder.adapted, adapters, count) if isinstance(adapters, Path) else adapters
        self.adapters, self.digests = held_adapters(config, decoder.adapted, folders)
        self.runner = ModelRunner(decoder, self.cache, self.adapters)

    def add(self, sequence: int, adapter: int | None) -> None:
        self.cache.add_sequence(sequence)
        if adapter is not None:
            self.adapters.take(sequence, self.digests[adapter])

    def remove(self, sequence: int) -> None:
        self.adapters.release(sequence)
        self.cache.remove_sequence(sequence)

    def prompts(self, prompts: Mapping[int, Sequence[int]]) -> Tensor:
        """Returns the logits after each prompt, computed in one forward."""
        tokens = [np.array(prompt) for prompt in prompts.values()]
        return compute_prompts(self.runner, list(prompts), tokens, [len(prompt) for prompt in prompts.values()])

    def steps(self, firsts: Mapping[int, int], count: int) -> list[list[int]]:
        """Returns the greedy tokens of the next `count` steps; each row's first input is given."""
        ids, rows = tuple(firsts), len(firsts)
        sampling = SampleBatch.from_params([SamplingParams(temperature=0)] * rows)
        tokens, found = np.array(list(firsts.values())), list[list[int]]()
        positions = np.array([self.cache.num_tokens(sequence) + 1 for sequence in ids])
        for step in range(count):
            pending = self.runner.step(ids, tokens, np.full(rows, -1), sampling, positions + step)
            tokens = pending.wait().token_ids
            found.append(tokens.tolist())
        return found

    def logits(self, sequence: int, token: int) -> Tensor:
        """Returns the logits of an eager step of one row."""
        return self.runner.launch(Batch([sequence]), np.array([token]), None)[0]

    def in_chunks(self, prompts: Mapping[int, Sequence[int]], splits: Mapping[int, int]) -> list[int]:
        """Returns the likeliest token after each prompt. Prompts in `splits` come in two forwards, the others in the
        second."""
        whole = {row: len(prompt) for row, prompt in prompts.items()}
        firsts = [np.array(prompts[row][:end]) for row, end in splits.items()]
        compute_prompts(self.runner, list(splits), firsts, [whole[row] for row in splits])
        rest = [np.array(prompt[splits.get(row, 0) :]) for row, prompt in prompts.items()]
        return compute_prompts(self.runner, list(prompts), rest, list(whole.values())).argmax(1).tolist()
