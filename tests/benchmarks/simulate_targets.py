"""Simulates a worker under more prompts than it can compute, to see how many first tokens come in time. Prints JSON.

The scheduler is the real one, and so is what the order of prompts costs a step, in microseconds of this host. Time is
simulated: prompts come at random times, and a step takes as long as its tokens do.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from tandem.workers.requests.prompt import Prompt
from tandem.workers.sampling.sampling_params import SamplingParams
from tandem.workers.scheduling.scheduler import Scheduler
from tandem.workers.wire.prompt_spec import PromptSpec
from tests.benchmarks.options import add_list, benchmark_parser
from tests.benchmarks.results import print_result
from tests.support.fixed_rate import FixedRate

RATE = 40_000.0  # prompt tokens a second
BATCH_TOKENS = 1024
MEDIAN, SIGMA = 800, 0.8  # of prompts, in tokens
TARGET = 0.5  # seconds
MANY = 200  # prompts


class Arrival(Prompt):
    """A prompt that waits for room."""

    due = math.inf  # by when its first token counts as in time, whether the scheduler knows it or not

    @property
    def has_room(self) -> bool:
        return False


def arrivals(
    load: float,
    seconds: float,
    known: float | None,
    *,
    targets: tuple[float, float] = (TARGET, TARGET),
    at_once: bool = False,
) -> list[Arrival]:
    """Prompts whose tokens are load times what the worker can compute in these seconds, sorted by arrival.

    known: the part of the target that the scheduler knows; None: it knows no target. targets: the lowest and the
    highest, with uniform logarithms between. at_once: all prompts come at the beginning.
    """
    generator = np.random.default_rng(0)
    mean = MEDIAN * np.exp(SIGMA**2 / 2)
    num = int(load * RATE / mean * seconds)
    times = np.sort(generator.uniform(0, 0 if at_once else seconds, num))  # a Poisson process of so many
    sizes = np.clip(generator.lognormal(np.log(MEDIAN), SIGMA, num), 1, 16_000).astype(int)
    drawn = np.exp(generator.uniform(math.log(targets[0]), math.log(targets[1]), num))
    prompts = []
    for number, (came, size, target) in enumerate(zip(times.tolist(), sizes.tolist(), drawn.tolist(), strict=True)):
        params = SamplingParams(first_token_seconds=None if known is None else known * target)
        spec = PromptSpec(np.zeros(size, np.int64))
        prompt = Arrival(str(number), number, spec, params, destination=None, arrived=came)  # type: ignore[arg-type]
        prompt.due = came + target
        prompts.append(prompt)
    return prompts


@dataclass
class Worker:
    """Computes prompts one step after another.

    room: tokens of prompts that fit at a time. unplanned_seconds: from a step to its first tokens. rate_error: by which
    the scheduler overestimates the rate.
    """

    prompts: list[Arrival]  # yet to come, sorted
    room: int = 1 << 40
    unplanned_seconds: float = 0.0
    rate_error: float = 1.0
    now: float = 0.0
    firsts: dict[int, float] = field(default_factory=dict)  # when each first token came, in the order of these times
    order_seconds: list[tuple[int, float]] = field(default_factory=list)  # of a real clock: prompts there, and the cost

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(BATCH_TOKENS, FixedRate(BATCH_TOKENS, RATE * self.rate_error))
        self._in_use = 0
        self._arriving = iter(self.prompts)
        self._next = next(self._arriving, None)

    def steps(self) -> Iterator[float]:
        """Runs until nothing is left to do; the time after each step."""
        scheduler = self.scheduler
        while self._arrive():
            began = time.perf_counter()
            scheduler.order(self.now)
            there = scheduler.num_running + scheduler.num_waiting
            self.order_seconds.append((there, time.perf_counter() - began))
            for prompt in scheduler.admitted(lambda one: self._in_use + one.num_tokens <= self.room):
                self._in_use += prompt.num_tokens
            batch = scheduler.next_batch()
            assert batch.chunks
            self.now += batch.prompt_tokens / RATE
            for prompt, length in batch.chunks:
                prompt.computed += length
                if prompt.computed == prompt.num_tokens:
                    self.firsts[prompt.sequence_id] = self.now + self.unplanned_seconds
                    self._in_use -= prompt.num_tokens
                    scheduler.remove(prompt)
            yield self.now

    def _arrive(self) -> bool:
        """Returns whether there are prompts, those that have come by now included. Time goes on to the next prompt if
        need be."""
        scheduler = self.scheduler
        if self._next is not None and not scheduler.num_running and not scheduler.num_waiting:
            self.now = max(self.now, self._next.arrived)
        while self._next is not None and self._next.arrived <= self.now:
            scheduler.add(self._next)
            self._next = next(self._arriving, None)
        return bool(scheduler.num_running or scheduler.num_waiting)

    @property
    def in_time(self) -> int:
        """Prompts whose first token came within their target."""
        return sum(first <= self.prompts[number].due for number, first in self.firsts.items())


def main() -> None:
    parser = benchmark_parser(__file__, __doc__)
    add_list(parser, "--loads", float, default=(0.8, 1.0, 1.3, 2.0), help="times the capacity")
    parser.add_argument("--simulated-seconds", type=float, default=60.0, help="of arrivals")
    parser.add_argument("--room", type=int, default=1 << 40, help="tokens of prompts that fit at a time")
    parser.add_argument("--unplanned", type=float, default=0.0, help="seconds from a step to its first tokens")
    parser.add_argument("--planned", type=float, default=1.0, help="part of the target that the scheduler knows")
    parser.add_argument("--rate-error", type=float, default=1.0, help="by which it overestimates the rate")
    parser.add_argument("--at-once", action="store_true", help="all prompts come at the beginning")
    add_list(parser, "--targets", float, default=(TARGET,), help="seconds; the lowest and the highest of several")
    options = parser.parse_args()
    seconds, result = options.simulated_seconds, {}
    targets = min(options.targets), max(options.targets)
    capacity = len(arrivals(1.0, seconds, None))
    for load in options.loads:
        for name, known in (("arrival", None), ("deadline", options.planned)):
            prompts = arrivals(load, seconds, known, targets=targets, at_once=options.at_once)
            worker = Worker(prompts, options.room, unplanned_seconds=options.unplanned, rate_error=options.rate_error)
            for _ in worker.steps():
                pass
            measured = {"in_time": worker.in_time, "in_time_of_capacity": round(worker.in_time / capacity, 3)}
            if costs := [1e6 * cost for there, cost in worker.order_seconds if there >= MANY]:
                measured["order_us"] = round(float(np.median(costs)), 1)
            result[f"{load:g} {name}"] = measured
    print_result(result, options)


if __name__ == "__main__":
    main()
