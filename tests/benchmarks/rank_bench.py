"""One rank of a worker, in a process with a GPU of its own: its shard of a model, timed while all ranks compute."""

import time
from typing import NamedTuple

from tandem.workers.ranks.ranks import ALONE
from tests.benchmarks.compressed_shapes import Fields
from tests.benchmarks.contexts import Contexts
from tests.benchmarks.measured import Measured
from tests.benchmarks.model_bench import AHEAD, ModelBench
from tests.benchmarks.model_shapes import COMMON, SHAPES
from tests.benchmarks.packed_weights import MODELS as PACKED
from tests.benchmarks.rank_floors import kept_bytes, num_sums, weight_bytes
from tests.benchmarks.step_bench import CHUNK
from tests.benchmarks.timeline import record, slowest_kernels
from tests.gpu.rank_process import RankPe

MODELS: dict[str, Fields] = {
    "qwen3-8b": COMMON | SHAPES["qwen3-8b"],
    "qwen3-30b-a3b": COMMON | SHAPES["qwen3-30b-a3b"],
    "gpt-oss-120b": PACKED["gpt-oss-120b"],
    "qwen3-next-8-layers": COMMON | SHAPES["qwen3-next-8-layers"],
}
PROMPT_ROUNDS = 3
SUMS, SUMS_BYTES, REPEATS = 50, 256 << 20, 20  # sums of a CUDA graph: SUMS, or as many as have SUMS_BYTES
PROFILED_STEPS = 4


class Case(NamedTuple):
    """The sizes to measure for a model: steps of up to `rows` rows at `context` positions, and a prompt; 0: none."""

    model: str  # of MODELS
    rows: int
    context: int
    prompt: int


class RankBench(RankPe):
    """See Pe. All ranks of a worker are told the same calls in the same order, for each call waits for the others."""

    def build(self, case: Case, size: int) -> tuple[float, float]:
        """Builds a worker of `size` ranks; several ranks have met. Returns the seconds to make model and cache, and to
        capture."""
        began = time.perf_counter()
        self._bench = ModelBench(
            MODELS[case.model],
            "cuda",
            sequences=case.rows,
            length=max(case.context, case.prompt),
            chunk=CHUNK,
            positions=max(case.rows * (case.context + AHEAD), case.prompt + AHEAD),
            ranks=self.ranks if size > 1 else ALONE,
        )
        made = time.perf_counter() - began
        return made, self._bench.capture_steps(case.rows)

    def decode(self, rows: int, context: int) -> tuple[Measured, float]:
        """Seconds of a step, and the bytes of weights, KV and states that this rank reads or writes in it."""
        lengths, config = Contexts(str(context)).lengths(rows), self._bench.config
        return self._bench.decode(lengths), weight_bytes(config, rows) + kept_bytes(config, lengths)

    def prefill(self, length: int) -> Measured:
        """Seconds to the first token of a prompt."""
        return self._bench.prefill(length, CHUNK, PROMPT_ROUNDS)

    def seconds_of_sums(self, tokens: int) -> float:
        """Returns the seconds of all sums of a forward of so many tokens, by themselves in a CUDA graph."""
        config = self._bench.config
        num_bytes = tokens * config.hidden_size * config.dtype.itemsize
        return num_sums(config) * self.seconds_each(num_bytes, max(1, min(SUMS, SUMS_BYTES // num_bytes)), REPEATS)

    def step_kernels(self, rows: int, context: int) -> list[str]:
        """The kernels of a step, the slowest first."""
        with self._bench.stored(Contexts(str(context)).lengths(rows)) as ids:
            self._bench.step_once(ids)
            spans = record(lambda: [self._bench.step_once(ids) for _ in range(PROFILED_STEPS)])
        return slowest_kernels(spans, PROFILED_STEPS)

    def prompt_kernels(self, length: int) -> list[str]:
        """The kernels of a prompt, the slowest first."""
        return slowest_kernels(record(lambda: self._bench.prompt(length, CHUNK)), 1)
