"""First tokens within their target while more prompts come than a worker can compute, in simulated time."""

import pytest

from tandem.workers.requests.prompt import Prompt
from tests.benchmarks.simulate_targets import BATCH_TOKENS, RATE, Worker, arrivals

SECONDS = 60.0
CAPACITY = len(arrivals(1.0, SECONDS, None))  # prompts that the worker can compute while they arrive
ROOMS = [1 << 40, 20_000]  # tokens


def oldest_late(worker: Worker) -> Prompt | None:
    """Returns the oldest late prompt that is there."""
    there = (*worker.scheduler._waiting, *worker.scheduler._running)
    late = [prompt for prompt in there if prompt.deadline <= worker.now]
    return min(late, key=lambda prompt: prompt.sequence_id, default=None)


@pytest.mark.gate("2.0-20000")
@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("load", [1.0, 1.3, 2.0])
def test_prompts_come_in_time_however_many_there_are(load: float, room: int) -> None:
    """The oldest late prompt is computed at one token in eight, at least."""
    worker = Worker(arrivals(load, SECONDS, 1.0), room)
    oldest, since, left = None, 0.0, 0
    for now in worker.steps():
        if (late := oldest_late(worker)) is not oldest:
            oldest, since = late, now
            left = 0 if late is None else late.num_tokens - late.computed
        # Prompts with room end before it has some, and no step is longer than a batch.
        bound = (8 * left + 16 * BATCH_TOKENS + min(room, 8 * left)) / RATE
        assert oldest is None or now - since <= bound, oldest.sequence_id
    assert len(worker.firsts) == len(worker.prompts)
    assert worker.in_time >= 0.8 * CAPACITY


@pytest.mark.parametrize(("load", "most"), [(1.0, 0.5), (1.3, 0.1), (2.0, 0.05)])
def test_in_the_order_of_arrival_few_come_in_time(load: float, most: float) -> None:
    """Without targets the same load leaves next to nothing in time."""
    worker = Worker(arrivals(load, SECONDS, None))
    order = [worker.firsts for _ in worker.steps()][-1]
    assert [*order] == sorted(order)
    assert worker.in_time <= most * CAPACITY


def test_nobody_is_late_where_there_is_time() -> None:
    worker = Worker(arrivals(0.6, SECONDS, 1.0))
    for _ in worker.steps():
        pass
    assert worker.in_time == len(worker.prompts)
