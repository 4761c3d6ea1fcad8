"""A model with random weights and a cache of random KV on one GPU, no cluster: its decode steps and prompts, timed."""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tandem.cache.paged_cache import PagedKVCache
from tandem.cache.plan.arrays import Int64Array
from tandem.cache.plan.kv_scales import KVScales
from tandem.workers.config import SpeculationSettings
from tandem.workers.models.decoder import DenseDecoder
from tandem.workers.models.drafters.drafted_decoder import DraftedDecoder
from tandem.workers.models.drafters.drafter_config import load_drafter_config
from tandem.workers.models.drafters.head import HeadedDecoder
from tandem.workers.models.drafters.load import load_drafter
from tandem.workers.models.registry import load_config
from tandem.workers.models.weights import load_decoder
from tandem.workers.runner.model_cache import kv_layout
from tandem.workers.runner.model_runner import ModelRunner
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.sampling.sampling_params import SamplingParams
from tests.benchmarks.contexts import Lengths
from tests.benchmarks.measured import Measured
from tests.benchmarks.model_shapes import write_eagle3, write_shape
from tests.benchmarks.timeline import Idle, idle, record
from tests.support.whole_prompts import compute_prompts

CHUNK = 8192
PAGE_SIZE = 16
MAX_LENGTH = 40_960
WARM_STEPS = 5
STEPS = 40
SEGMENT = 10  # steps; of their means the spread is made
RECORDED_STEPS = 8
NO_DRAFTER = SpeculationSettings()


class Bench:
    def __init__(
        self,
        shape: str,
        max_batch: int,
        num_tokens: int | None = None,
        scales: KVScales | None = None,
        speculation: SpeculationSettings = NO_DRAFTER,
    ) -> None:
        """shape: a name of SHAPES. num_tokens: in all sequences together; None: 1,200 each and one of MAX_LENGTH.
        speculation: of a drafter with layers; draft is set here."""
        with tempfile.TemporaryDirectory() as folder:
            model = write_shape(shape, Path(folder))
            self.config = load_config(model, "bfloat16")
            decoder: DenseDecoder | DraftedDecoder | HeadedDecoder
            before = torch.cuda.memory_allocated()
            decoder = load_decoder(model, self.config, load_format="dummy", device="cuda")
            self.target = decoder
            self.weight_bytes = torch.cuda.memory_allocated() - before
            speculation = replace(speculation, draft=str(write_eagle3(shape, Path(folder))))
            drafter = load_drafter_config(speculation, self.config)
            if drafter is not None:
                decoder = load_drafter(model, speculation, decoder, drafter, load_format="dummy")
        self.scales = scales
        layout = kv_layout(self.config, PAGE_SIZE, scales, drafter)
        num_pages = (num_tokens or max_batch * 1200 + MAX_LENGTH) // PAGE_SIZE
        shapes = [
            (max_batch + 1 if paging.whole else num_pages, *layout.page_shape(group))
            for group, paging in enumerate(layout.paging)
        ]
        self.cache = PagedKVCache(
            layout,
            tuple(random_pool(shape, layout.stored_dtype_of(group)) for group, shape in enumerate(shapes)),
            max_sequences=max_batch + 1,
            max_sequence_length=MAX_LENGTH,
            rope=self.config.rope,
            writer=None,
        )
        self.runner = ModelRunner(decoder, self.cache)
        began = time.perf_counter()
        self.runner.warm_up()
        self.warm_up_seconds = time.perf_counter() - began
        self.runner.capture_steps(max_batch)
        torch.cuda.synchronize()
        self.capture_seconds = time.perf_counter() - began - self.warm_up_seconds

    def decode(self, contexts: Lengths, params: SamplingParams) -> tuple[Measured, Idle]:
        """Seconds of a step, the mean of STEPS, and the idle time of one.

        contexts: int64 [rows], positions stored before the middle one of the steps timed.
        """
        ids, stored = tuple(range(contexts.size)), contexts - WARM_STEPS - STEPS // 2
        for sequence in ids:
            self.cache.add_sequence(sequence)
            self.cache.prepare_receive(sequence, int(stored[sequence]))
            self.cache.finish_receive(sequence)
        sampling = SampleBatch.from_params([params] * contexts.size)

        def run(steps: int) -> list[float]:
            return step_times(self.runner, ids, sampling, stored, steps)

        run(WARM_STEPS)
        times = run(STEPS)
        segments = [(end - begin) / SEGMENT for begin, end in pairwise(times[::SEGMENT])]
        seen = idle(record(lambda: run(RECORDED_STEPS)))
        for sequence in ids:
            self.cache.remove_sequence(sequence)
        unused = Idle(seen.between / (RECORDED_STEPS - 1), seen.inside / RECORDED_STEPS)
        return Measured.of((times[-1] - times[0]) / STEPS, segments), unused

    def prefill(self, length: int, rounds: int = 3) -> tuple[Measured, float]:
        """Seconds to the first token, median of `rounds` after one, and those that the device works for it."""
        greedy = SampleBatch.from_params([SamplingParams(temperature=0)])
        tokens = np.random.default_rng(0).integers(0, self.config.vocab_size, length)

        def run() -> None:
            self.cache.add_sequence(0)
            logits = compute_prompt(self.runner, 0, tokens, CHUNK)
            self.runner.sample(logits, greedy, np.array([length]))
            self.cache.remove_sequence(0)

        times = []
        for _ in range(rounds + 1):
            torch.cuda.synchronize()
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
        return Measured.median(times[1:]), sum(span.end - span.begin for span in record(run)) / 1e6


def step_times(
    runner: ModelRunner, ids: Sequence[int], sampling: SampleBatch, positions: Lengths, steps: int
) -> list[float]:
    """When the first of `steps` began, and when each step's tokens were there; each is launched before the tokens of
    the one before are read. positions: int64 [rows], see ModelRunner.step."""
    times = [time.perf_counter()]
    tokens, rows = np.ones(len(ids), np.int64), np.arange(len(ids))
    flight = runner.step(ids, tokens, np.full(len(ids), -1), sampling, positions)
    for step in range(1, steps):
        following = runner.step(ids, tokens, rows, sampling, positions + step)
        flight.wait()
        times.append(time.perf_counter())
        flight = following
    flight.wait()
    return [*times, time.perf_counter()]


def compute_prompt(runner: ModelRunner, sequence: int, tokens: Int64Array, chunk: int, done: int = 0) -> Tensor:
    """Logits [1, vocab] behind a prompt, int64 [n], of a sequence that holds its first `done`; so many a forward."""
    chunks = [tokens[begin : begin + chunk] for begin in range(done, tokens.size, chunk)]
    *_, logits = (compute_prompts(runner, [sequence], [one], [tokens.size], push=False) for one in chunks)
    return logits


def random_pool(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cuda") -> Tensor:
    """Normal numbers; of 8 bits, page by page, for they cannot be drawn in place."""
    pool = torch.empty(shape, dtype=dtype, device=device)
    if dtype.itemsize > 1:
        return pool.normal_()
    some = torch.randn((min(64, shape[0]), *shape[1:]), device=device).to(dtype).view(torch.uint8)
    for part in pool.view(torch.uint8).split(some.shape[0]):
        part.copy_(some[: part.shape[0]])
    return pool
