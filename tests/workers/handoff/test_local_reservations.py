"""A local reservation lasts: its prompt is computed in any chunks and decoded to its end, whatever others share."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import cast

import pytest

from tandem.cache.plan.spans import ALL, Chunk, Window
from tandem.transfer.recall import mailbox_rows
from tandem.workers.config import LoopSettings
from tandem.workers.counters import Counters
from tandem.workers.engine.engine import Engine
from tandem.workers.errors import InvalidCall, NoRoom
from tandem.workers.handoff.reservations import Reservations
from tandem.workers.handoff.sequence_room import longest_append
from tandem.workers.requests.decode_request import DecodeRequest
from tandem.workers.requests.sequence_ids import SequenceIds
from tandem.workers.runner.batch_buckets import GraphSizes
from tandem.workers.runner.model_runner import ModelRunner
from tandem.workers.sampling.finish import FinishReason
from tandem.workers.sampling.sampling_params import SlidingWindow
from tests.cache.naive import ROPE, layout_of, spanned
from tests.support.fake_transport import FakeFabric
from tests.support.oracle import random_prompt
from tests.support.prompt_specs import spec_of
from tests.support.tvm_cache import TvmCache
from tests.workers.loop_pair import DECODE, NO_SPECULATION, Clock, LoopPair

LONGEST, MOST_OUTPUT = 200, 60
PE = 1


@dataclass
class Begun:
    """A request, and the tokens whose positions its sequence holds."""

    request: DecodeRequest
    tokens: list[int]


class Worker:
    """One with windows. Nothing is computed: forwards are begun, which takes their pages."""

    def __init__(self, seed: int, more: int | None = None) -> None:
        """more: pages of the pool beside those that the longest request needs; None: up to twice as many."""
        self.random = random = Random(seed)
        page_size, window = random.choice([1, 2, 4, 8]), Window(random.randint(1, 40))
        self.chunk = random.choice([2, 5, 9, 16, 33])
        spans = random.choice([(window,), (ALL, window), (window, Chunk(page_size * random.randint(1, 5)))])
        self.layout = spanned(layout_of(*[1] * len(spans), page_size=page_size), *spans)
        longest = max(self.chunk, longest_append(NO_SPECULATION))
        self.most = max(self.layout.most_pages(group, LONGEST, longest) for group in range(len(spans)))
        num_pages = self.most + (random.randint(0, 2 * self.most) if more is None else more)
        fabric = FakeFabric(2, self.layout, num_pages=num_pages, num_signals=mailbox_rows(8, 2))
        transport = fabric.joined()[PE]
        self.cache = TvmCache(
            self.layout,
            transport.pools,
            max_sequences=16,
            max_sequence_length=LONGEST,
            rope=ROPE,
            writer=None,
        )
        settings = LoopSettings(10, sharing=True, max_batch_tokens=self.chunk, max_sequences=6)
        runner = cast(ModelRunner, SimpleNamespace(graph_sizes=GraphSizes(), adapters=None))  # which launches nothing
        engine = Engine(self.cache, runner, transport)
        self.reservations = Reservations(engine, Counters(), SequenceIds(), settings, Clock())
        self.texts = [[random.randrange(10) for _ in range(LONGEST)] for _ in range(2)]
        self.begun: dict[str, Begun] = {}
        self.count = self.refused = 0

    def prepare(self) -> None:
        """A prompt that may begin as earlier ones did. Alone it has room: none is longer than LONGEST."""
        random, self.count = self.random, self.count + 1
        known = random.choice(self.texts)[: random.randrange(LONGEST - MOST_OUTPUT - 1)]
        own = random.randint(1, LONGEST - MOST_OUTPUT - len(known))
        prompt = [*known, *random.choices(range(10, 20), k=own)]
        try:
            self.reservations.prepare(f"r{self.count}", spec_of(prompt), random.randint(1, MOST_OUTPUT), PE)
        except NoRoom:
            assert self.begun, "a request has no room on a worker that serves no other"
            self.refused += 1
            return
        request = self.reservations.get(f"r{self.count}")
        assert request is not None
        self.begun[request.request_id] = Begun(request, prompt[: len(prompt) - request.expected_tokens])

    def compute(self, begun: Begun) -> None:
        """A chunk, which others may share from then on."""
        request, tokens = begun.request, begun.tokens
        prompt = request.prompt.token_ids.tolist()
        count = self.random.randint(1, min(self.chunk, len(prompt) - len(tokens)))
        self.append(begun, prompt[len(tokens) : len(tokens) + count])
        self.cache.publish_prefix(request.sequence_id, tokens)
        if len(tokens) == len(prompt):
            self.reservations.narrow(request)

    def append(self, begun: Begun, tokens: list[int]) -> None:
        self.cache.begin_forward([begun.request.sequence_id], [len(tokens)])
        begun.tokens += tokens

    def bring_on(self, begun: Begun) -> None:
        """A chunk, some steps, or the end, which some come to before they have all their tokens."""
        request = begun.request
        left = len(request.prompt) + request.max_tokens - 1 - len(begun.tokens)
        if self.random.random() < 0.03 or not left:
            self.cache.publish_prefix(request.sequence_id, begun.tokens)
            del self.begun[request.request_id]
            self.cache.remove_sequence(request.sequence_id)
            self.reservations.end(request, writer_quiet=True)
        elif len(begun.tokens) < len(request.prompt):
            self.compute(begun)
        else:
            for _ in range(min(self.random.randint(1, 10), left)):
                self.append(begun, [self.random.randrange(20)])


@pytest.mark.parametrize("seed", range(12))
def test_no_reserved_request_runs_out_of_pages(seed: int) -> None:
    worker = Worker(seed)
    for _ in range(250):
        if worker.random.random() < 0.3 or not worker.begun:
            worker.prepare()
        else:
            worker.bring_on(worker.random.choice(list(worker.begun.values())))
    assert worker.refused, "no request was refused: the pool was never full"
    for begun in list(worker.begun.values()):
        while begun.request.request_id in worker.begun:
            worker.bring_on(begun)
    assert worker.cache.num_free_pages == worker.cache.num_pages


@pytest.mark.parametrize("seed", range(6))
def test_a_request_that_needs_the_whole_pool_is_served_again_and_again(seed: int) -> None:
    """Also where it finds its prompt in the prefix index, whose pages count."""
    worker = Worker(seed, more=0)
    prompt = worker.texts[0][: LONGEST - 1]
    for number in range(3):
        worker.reservations.prepare(f"r{number}", spec_of(prompt), 2, PE)
        request = worker.reservations.get(f"r{number}")
        assert request is not None
        begun = worker.begun[request.request_id] = Begun(request, prompt[: len(prompt) - request.expected_tokens])
        assert bool(begun.tokens) == (number > 0)
        while worker.begun:
            worker.bring_on(begun)


@pytest.mark.parametrize("seed", range(6))
def test_what_the_pool_cannot_hold_is_refused_with_what_it_needs(seed: int) -> None:
    worker = Worker(seed, more=-1)
    with pytest.raises(InvalidCall, match=f"need {worker.most} pages; this worker has {worker.most - 1} "):
        worker.reservations.prepare("long", spec_of(worker.texts[0]), 1, PE)
    assert worker.cache.num_free_pages == worker.cache.num_pages == worker.most - 1


def test_a_prompt_whose_sequence_slides_is_shared_with_nobody(folder: Path) -> None:
    """Others hold all that the pool has when it slides, and would keep the pages that leave its window."""
    pair, prompt, sliding = LoopPair(folder, num_pages=12, sharing=True), random_prompt(40, 1), SlidingWindow(20, 4)
    reservation = pair.decode.prepare("slides", spec_of(prompt, sliding=sliding), 60, DECODE)
    pair.start("slides", reservation, 60)
    while not pair.tokens("slides"):
        pair.step_decode()
    for length in (len(prompt), 1):
        with suppress(NoRoom):
            for number in range(12):
                pair.decode.prepare(f"other {number} of {length}", spec_of(prompt[:length]), 8, DECODE)
    assert pair.caches[DECODE].num_free_pages == 0
    pair.run_decode()
    assert pair.ended("slides") == FinishReason.LENGTH
    assert len(pair.tokens("slides")) == 60
