"""Records what a GPU did while something ran, from the profiler's timeline."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

COPIES = ("Memcpy HtoD", "Memcpy DtoH")
FIRST_KERNEL = "_fetch"  # of a step's CUDA graph


@dataclass(frozen=True)
class Span:
    """One kernel or copy on the device; times in µs."""

    begin: float
    end: float
    name: str

    @property
    def is_copy(self) -> bool:
        """Between host and device: in no CUDA graph of ours."""
        return self.name.startswith(COPIES)


@dataclass(frozen=True)
class Idle:
    """µs in which nothing ran. between: before a step's first kernel, and before and after copies. inside: of all other
    gaps, those between the kernels of a graph. Both are too large by what recording each kernel costs.
    """

    between: float
    inside: float


def idle(spans: Sequence[Span]) -> Idle:
    """Returns the idle times of a timeline, in any order, from the first step's first kernel on; spans may overlap."""
    begin = min((span.begin for span in spans if span.name == FIRST_KERNEL), default=0.0)
    ordered = sorted((span for span in spans if span.begin >= begin), key=lambda span: span.begin)
    between = inside = 0.0
    last = ordered[0]  # of those so far the one that ends last
    for span in ordered[1:]:
        gap = max(span.begin - last.end, 0.0)
        if span.is_copy or last.is_copy or span.name == FIRST_KERNEL:
            between += gap
        else:
            inside += gap
        last = max(last, span, key=lambda one: one.end)
    return Idle(between, inside)


def slowest_kernels(spans: Sequence[Span], steps: int, most: int = 30, width: int = 80) -> list[str]:
    """A line for each kernel, the one with the largest total first: µs and launches a step, and its name.

    A kernel that starts early waits for the one before, and the wait counts for both.
    """
    times = defaultdict[str, list[float]](list)
    for span in spans:
        times[span.name].append(span.end - span.begin)
    ordered = sorted(times.items(), key=lambda item: -sum(item[1]))
    total = [f"{sum(map(sum, times.values())) / steps:9.1f} us {len(spans) / steps:7.1f} x  all"]
    return total + [
        f"{sum(each) / steps:9.1f} us {len(each) / steps:7.1f} x  {name[:width]}" for name, each in ordered[:most]
    ]


def record(run: Callable[[], object]) -> list[Span]:
    """Returns what the device does during run(), which must wait for it."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        run()
    events = profiler.events() or []
    on_device = [one for one in events if one.device_type.name == "CUDA"]
    return [Span(one.time_range.start, one.time_range.end, one.name) for one in on_device]
