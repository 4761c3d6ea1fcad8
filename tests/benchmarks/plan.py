"""The plan of a decode step of 256 sequences at context 1K, by feature. Prints JSON.

Processor time in µs: the least of 200 steps, which neighbours on the machine disturb least, and their median.
windows: a second layer group, with a window. compressed: the kinds of layers of DeepSeek-V4 in five groups, a window
of 128, entries for 4 and for 128 positions, and windows of 8 and 128 of what these are made of. shared: groups of 16
sequences that have 512 positions in common. sends: 16 sequences are being sent. streams: 8 sequences slide. The native
kernels' own planning is in it. kept: the same sequences step after step; spread: the same at unlike contexts, so that
at every step 16 begin a page and some lose one; changed: other ones at each step, so that what they share is found
anew.
"""

import time
from dataclasses import replace
from itertools import cycle, product

import numpy as np
import torch
from torch import Tensor

from tandem.cache.kernels.base import KVBackend
from tandem.cache.kernels.choice import choose_kernels
from tandem.cache.kernels.fp8_entries import Fp8Entries
from tandem.cache.kernels.scoring import Scoring
from tandem.cache.kinds.compressed import Beside
from tandem.cache.kinds.kv import KV
from tandem.cache.plan.arrays import Int32Array
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.position_map import PositionMap, SlotRuns
from tandem.cache.plan.rope import RopeParameters
from tandem.cache.plan.shared_prefixes import SharingRule
from tandem.cache.plan.spans import Every, Window
from tandem.cache.plan.stored_layers import Stages
from tests.benchmarks.measured import Measured, rounded
from tests.benchmarks.options import Budget, add_list, add_seconds, benchmark_parser
from tests.benchmarks.results import at_most, print_result
from tests.support.tvm_cache import TvmCache

BATCH, CONTEXT, COMMON, PAGE = 256, 1024, 512, 16
WARM_UP, STEPS = 40, 200
CASES = (
    (),
    ("windows",),
    ("shared",),
    ("sends",),
    ("streams",),
    ("windows", "shared", "sends"),  # all, but those that the other has: layouts with windows take no streams
    ("streams", "shared", "sends"),
    ("compressed",),
)
COMPRESSED = (  # of how many layers makes no difference
    LayerGroup((0, 1), KV(1, 8, Window(128))),
    LayerGroup((0,), Beside(1, 8, Every(4), planes=1)),
    LayerGroup((1,), Beside(1, 8, Every(128), planes=1)),
    LayerGroup((0,), Beside(1, 8, Window(8), planes=1)),
    LayerGroup((1,), Beside(1, 8, Window(128), planes=1)),
)


class Nowhere:
    """PageWriter: what is planned is not sent."""

    def peer_pool(self, pe: int, group: int) -> None:
        return None

    def write_slots(
        self, pe: int, group: int, source_slots: Int32Array, target_slots: Int32Array, stages: Stages = ()
    ) -> None: ...

    def write_tokens(
        self, pe: int, group: int, layer: int, k: Tensor, v: Tensor | None, token_indices: Tensor, slots: Tensor
    ) -> None: ...


def looking_for_prefixes(pool: Tensor, scoring: Scoring, fp8: Fp8Entries | None = None) -> KVBackend:
    """Kernels that do not share, but for which is found what could be."""
    kernels = choose_kernels(pool, scoring, fp8)
    if scoring.window is None:
        vars(kernels)["capabilities"] = replace(kernels.capabilities, sharing=SharingRule(16, 64))
    return kernels


def page_counts(layout: KVLayout) -> list[int]:
    """Per group."""
    if len(layout.groups) <= 2:
        return [BATCH * (CONTEXT // PAGE + 24)] * len(layout.groups)
    return [BATCH * (layout.most_pages(group, CONTEXT * 2, COMMON) + 1) for group in range(len(layout.groups))]


def make_cache(features: tuple[str, ...], *, spread: bool = False) -> TvmCache:
    groups = [LayerGroup((0,), KV(1, 8))] + [LayerGroup((1,), KV(1, 8, Window(128)))] * ("windows" in features)
    layout = KVLayout(COMPRESSED if "compressed" in features else tuple(groups), PAGE, torch.float32)
    cache = TvmCache(
        layout,
        [torch.zeros(count, *layout.page_shape(group)) for group, count in enumerate(page_counts(layout))],
        max_sequences=BATCH,
        max_sequence_length=CONTEXT * 2,
        rope=RopeParameters("default", 8),
        writer=Nowhere(),
        kernels=looking_for_prefixes if "shared" in features else choose_kernels,
    )
    for sequence in range(BATCH):
        slides = "streams" in features and sequence >= BATCH - 8
        if "shared" in features and sequence % 16 and not slides:
            cache.fork_sequence(sequence // 16 * 16, sequence)
            continue
        cache.add_sequence(sequence)
        if slides:
            cache.enable_sliding_window(sequence, 128, 4)
        cache.prepare_receive(sequence, COMMON)
        cache.finish_receive(sequence)
    for sequence in range(BATCH):
        context = CONTEXT - (sequence * 7 % (4 * PAGE) if spread else 0)
        cache.prepare_receive(sequence, context - COMMON)
        cache.finish_receive(sequence)
        if "sends" in features and sequence < 16:
            runs = SlotRuns(np.array([PAGE * sequence], np.int32), np.array([CONTEXT // 2], np.int32))
            cache.mark_send(sequence, context, PositionMap(context, (runs,) * len(groups)), 1)
    return cache


def measure(features: tuple[str, ...], batches: list[np.ndarray], *, spread: bool = False) -> dict[str, float]:
    cache, turns = make_cache(features, spread=spread), cycle(batches)

    def plan() -> None:
        sequences = next(turns)
        cache.begin_forward(sequences, np.ones(sequences.size, np.int64))

    times = []
    for _ in range(WARM_UP + STEPS):
        began = time.thread_time()
        plan()
        times.append(time.thread_time() - began)
    return {
        "least": rounded(min(times[WARM_UP:]) * 1e6),
        "median": Measured.median(times[WARM_UP:], 1e6),
    }


def main() -> None:
    everybody = np.arange(BATCH)
    others = [everybody, everybody[::-1].copy()]
    kinds = {"kept": ([everybody], False), "spread": ([everybody], True), "changed": (others, False)}
    cases = {"+".join(features) or "plain": features for features in CASES}
    parser = benchmark_parser(__file__, __doc__)
    add_list(parser, "--kinds", default=list(kinds), choices=list(kinds))
    add_list(parser, "--cases", default=list(cases), choices=list(cases))
    add_seconds(parser)
    options = parser.parse_args()
    found: dict[str, dict[str, dict[str, float]]] = {}
    for kind, name in Budget(options.seconds).within(product(options.kinds, options.cases)):
        batches, spread = kinds[kind]
        found.setdefault(f"{kind}_us", {})[name] = measure(cases[name], batches, spread=spread)
    kept = found.get("kept_us", {})
    limited = [name for name in list(cases)[5:7] if name in kept]
    targets = [at_most(f"plan of {name}, µs", kept[name]["median"], 300) for name in limited]
    for kind, times in found.items():
        if {"plain", "compressed"} <= times.keys():
            beyond = rounded(times["compressed"]["median"] - times["plain"]["median"])
            targets.append(at_most(f"plan of compressed beyond plain, {kind.removesuffix('_us')}, µs", beyond, 150))
    print_result({**found, "targets": targets}, options)


if __name__ == "__main__":
    main()
