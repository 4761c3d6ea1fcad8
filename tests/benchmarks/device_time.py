"""Measures a GPU's time by Triton's timers."""

from collections.abc import Callable
from typing import Any

import torch

from tests.benchmarks.measured import Measured, rounded

COPY_BYTES = 2 << 30


def device_seconds(run: Callable[[], object], milliseconds: int = 300) -> Measured:
    """Median on the device, caches flushed before each run. milliseconds: of all runs together, about."""
    from triton.testing import do_bench

    times: Any = do_bench(run, warmup=50, rep=milliseconds, return_mode="all")
    return Measured.median(times, 1e-3)


def graph_seconds(run: Callable[[], object]) -> Measured:
    """Median on the device, of calls in a CUDA graph."""
    from triton.testing import do_bench_cudagraph

    times: Any = do_bench_cudagraph(run, rep=200, return_mode="all")
    return Measured.median(times, 1e-3)


def kernel_microseconds(run: Callable[[], object], calls: int = 10) -> dict[str, float]:
    """The mean of each kernel that a call launches once, by its name, on the device."""
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
    found: Any = profiled.key_averages()
    return {event.key: rounded(event.self_device_time_total / calls) for event in found if event.count == calls}


def measure_copy() -> float:
    """C: bytes that a device copy reads and writes a second."""
    source = torch.randint(0, 255, (COPY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / device_seconds(lambda: target.copy_(source))
