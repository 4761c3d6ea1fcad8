"""Measures the host from one verify step's tokens to the next launch, without a device or cluster. Prints JSON.

A decode worker's loop, its cache and its graph buffers are real; a replay posts tokens at once, which agree with a
draft up to a random place. Processor time in µs: the least of 300 steps, which neighbours on the machine disturb least,
and their median. The replay's own time is taken off.

rows n, drafts k    n sequences at a context of CONTEXT, each with a draft of k tokens at every step
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from tandem.cache.kernels.base import KVBackend
from tandem.cache.kernels.fp8_entries import Fp8Entries
from tandem.cache.kernels.scoring import Scoring
from tandem.cache.kinds.kv import KV
from tandem.cache.paged_cache import PagedKVCache
from tandem.cache.plan.arrays import Int64Array
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.rope import RopeParameters
from tandem.transfer.completion import pack_payload, pack_signal
from tandem.transfer.recall import mailbox_rows
from tandem.workers.config import LoopSettings, SpeculationSettings
from tandem.workers.decode.kernel_threads import KernelThreads
from tandem.workers.engine.engine import Engine
from tandem.workers.models.decoder import DenseDecoder
from tandem.workers.prefill.push_meter import PushMeter
from tandem.workers.requests.token_stream import TokenFanout, TokenStream, TokenUpdate
from tandem.workers.runner.model_runner import ModelRunner
from tandem.workers.sampling.posted_samples import half_of
from tandem.workers.sampling.sampling_params import SamplingParams
from tandem.workers.speculation.draft_length import DraftLength
from tandem.workers.speculation.drafter import DraftAsk
from tandem.workers.steps.step_loop import Ends, StepLoop
from tests.benchmarks.measured import Measured, rounded
from tests.benchmarks.options import add_list, benchmark_parser
from tests.benchmarks.results import print_result
from tests.cache.table_kernels import TableKernels
from tests.support.fake_transport import FakeFabric
from tests.support.prompt_specs import spec_of

ROWS, DRAFTS = (1, 8, 32), (3, 7)
CONTEXT, PAGE, STEPS, WARM_UP = 1024, 16, 300, 20
LENGTH = CONTEXT + 8 * (STEPS + 2 * WARM_UP)
LAYOUT = KVLayout((LayerGroup((0,), KV(1, 4)),), PAGE, torch.float32)
MOST_TOKENS = 256  # of a verify step


class Counting:
    """A Drafter: numbers that go on from the last token."""

    computes = False

    def propose(self, asks: Sequence[DraftAsk]) -> list[Int64Array]:
        return [ask.context[-1] + np.arange(1, ask.most + 1) for ask in asks]

    def forget(self, sequence_id: int) -> None: ...


class Model:
    """Stands for the decoder, none of whose forwards is ever computed."""

    device = torch.device("cpu")

    config = SimpleNamespace(num_heads=1, hidden_size=4)


class Nobody:
    """Stands for TokenFanout."""

    def publish(self, updates: list[TokenUpdate]) -> None: ...

    def fail(self, token_stream: TokenStream, error: Exception) -> None:
        raise error


class Replays:
    """A Capture: each replay posts, behind every token, the next number, but at a random place of each draft."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._random = np.random.default_rng(1)

    def __call__(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        assert isinstance(compute, partial)
        graphs, buffers = cast(Any, compute.func).__self__, compute.args[0]
        tokens, _, tickets = (one.numpy() for one in buffers.inputs[:3])
        words, logits = graphs._posts.words.numpy(), torch.zeros(buffers.size, 1)

        def replay() -> Tensor:
            began = time.thread_time()
            wrong = self._random.random(tokens.size) < 0.2
            words[half_of(int(tickets[0])), : tokens.size] = tickets + tokens + 1 + wrong
            self.seconds += time.thread_time() - began
            return logits

        return replay


def kernels(pool: Tensor, scoring: Scoring, fp8: Fp8Entries | None = None) -> KVBackend:
    return TableKernels(pool, scoring, fp8)


def make_loop(rows: int, drafts: int) -> tuple[StepLoop, Replays]:
    """Makes the loop of a decode worker with as many requests."""
    num_pages = rows * (-(-LENGTH // PAGE) + 2)
    fabric = FakeFabric(2, LAYOUT, num_pages=num_pages, num_signals=mailbox_rows(rows, 2))
    sender, receiver = fabric.joined()
    cache = PagedKVCache(
        LAYOUT,
        receiver.pools,
        max_sequences=2 * rows,
        max_sequence_length=LENGTH,
        rope=RopeParameters("default", 4),
        writer=None,
        kernels=kernels,
    )
    runner, replays = ModelRunner(cast(DenseDecoder, Model()), cache), Replays()
    runner.capture_steps(rows, replays)
    runner.capture_verification(MOST_TOKENS, replays)
    settings = LoopSettings(
        lease_seconds=600,
        sharing=False,
        max_sequences=rows,
        speculation=SpeculationSettings("ngram", drafts, MOST_TOKENS),
    )
    ends = Ends(PushMeter(receiver), cast(TokenFanout, Nobody()), KernelThreads(None, 1), Counting())
    loop = StepLoop(Engine(cache, runner, receiver), settings, ends)
    for row in range(rows):
        reservation = loop.decodes.prepare(str(row), spec_of([1] * CONTEXT), LENGTH - CONTEXT - 1, writer_pe=0)
        signal = pack_signal(reservation.generation, CONTEXT)
        sender.post(1, reservation.signal_slot, signal, pack_payload(1, 0))
        params = SamplingParams(temperature=0, max_tokens=LENGTH - CONTEXT - 1)
        loop.decodes.start(str(row), reservation.reservation_id, params, TokenStream())
    return loop, replays


def measure(rows: int, drafts: int) -> dict[str, float]:
    """Measures one verify step: from its tokens to the next launch, and all that the host does for a step."""
    loop, replays = make_loop(rows, drafts)
    for _ in range(WARM_UP):
        loop.step()
    times = []
    for _ in range(STEPS):
        began, replayed = time.thread_time(), replays.seconds
        loop.step()
        times.append(time.thread_time() - began - replays.seconds + replayed)
    return {"least": rounded(min(times) * 1e6), "median": Measured.median(times, 1e6)}


def main() -> None:
    parser = benchmark_parser(__file__, __doc__)
    add_list(parser, "--rows", int, default=ROWS)
    add_list(parser, "--drafts", int, default=DRAFTS)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for rows, drafts in product(options.rows, options.drafts):
        with mock.patch.object(DraftLength, "next", return_value=drafts):
            results[f"rows {rows}, drafts {drafts}"] = measure(rows, drafts)
    print_result(results, options)


if __name__ == "__main__":
    main()
