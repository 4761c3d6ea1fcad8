"""Measures routing decisions, and each policy under simulated traffic. Prints JSON; needs no worker.

decision   64 workers in 8 islands whose indexes have a million pages in all; prompts of 8,192 tokens. From the
           request to the first pair, with its keys made before. None held; all workers hold a system prompt of
           40 pages and one holds 500; and the latter where a request was placed, another one ended and a worker
           reported since the last decision, with what these take, by each policy. Beside them the keys of the
           whole prompt, made once a request, and memory.
policies   4 prefill workers of 39,000 tokens a second, simulated; the routing policy is the real one. Chats of
           many turns with shared system prompts, at 60 and 90 % of what the workers could compute at best, with
           memory for all and for a quarter; and one hot prefix of 8,000 tokens before short questions.
"""

import asyncio
import heapq
import itertools
import mmap
import random
import timeit
import tracemalloc
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tandem.cluster.peers.table import GatewayTable, table_bytes
from tandem.cluster.routing.cost_model import adaptive
from tandem.cluster.routing.islands import Islands, LinkPair
from tandem.cluster.routing.membership import IslandState
from tandem.cluster.routing.policy import POLICIES, Ask, Policy, WorkerLoad, prefix_aware
from tandem.cluster.routing.prefix_view import PrefixView, PromptKeys
from tandem.cluster.routing.worker_link import WorkerAddress
from tandem.proto import worker_pb2
from tandem.workers.config import Role
from tests.benchmarks.options import add_list, benchmark_parser
from tests.benchmarks.results import at_most, percentile, print_result

PARTS = ("decision", "policies")
PAGE, PROMPT = 16, 8192
ISLANDS, WORKERS_AN_ISLAND = 8, 8
PAGES = 1_000_000
REQUESTS = 256  # that are placed at a time
RATE, BATCH_TOKENS, STEP_SECONDS = 39_000.0, 8192, 0.004
REPORT_SECONDS = 0.02
TOKEN_SECONDS = 0.008


# Decisions


def microseconds(call: Any, number: int) -> float:
    return min(timeit.repeat(call, number=number, repeat=9)) / number * 1e6


async def decisions() -> dict[str, float]:
    table = GatewayTable(mmap.mmap(-1, table_bytes(1, ISLANDS)), 1, ISLANDS)
    islands = Islands(1 << 24, prefix_aware, PAGE, table)
    roles = [Role.PREFILL] * (WORKERS_AN_ISLAND // 2) + [Role.DECODE] * (WORKERS_AN_ISLAND // 2)
    workers = tuple(WorkerAddress(role, pe, "127.0.0.1:1", "none") for pe, role in enumerate(roles))
    for number in range(ISLANDS):
        await islands.update(IslandState(f"i{number}", 1, 0, workers, 1, number))
    view, keys = islands._prefixes, list(islands.links())
    draw = np.random.default_rng(0)
    tracemalloc.start()
    for key in keys:
        names = draw.integers(0, 1 << 63, PAGES // len(keys), np.int64).astype("<u8").tobytes()
        view.apply(key, worker_pb2.WorkerReport(whole=True, added=names))
    mebibytes = tracemalloc.get_traced_memory()[0] / (1 << 20)
    tracemalloc.stop()
    prompts = [draw.integers(0, 1 << 17, PROMPT, np.int64) for _ in range(50)]
    made = [PromptKeys(prompt, PAGE) for prompt in prompts]
    turns = itertools.cycle(made)

    def decide() -> LinkPair:
        return next(islands.pairs(Ask(PROMPT, 100), next(turns)))

    for prompt in made:
        prompt.first(prompt.num_pages)
    found = {"pages": float(len(view.pages)), "view_mib": mebibytes, "none_held_us": microseconds(decide, 200)}
    for prompt in made:
        names = np.array(prompt.first(500), "<u8").tobytes()
        for key in keys:
            view.apply(key, worker_pb2.WorkerReport(added=names[: 8 * 40]))
        view.apply(keys[3], worker_pb2.WorkerReport(added=names[: 8 * 500]))
    found["held_us"] = microseconds(decide, 200)
    found["traffic_us"] = _under_traffic(islands, decide, 200)
    for name, colocated in (("adaptive", False), ("colocated", True)):
        islands._policy = adaptive(TOKEN_SECONDS, colocated=colocated)
        found[f"{name}, traffic_us"] = _under_traffic(islands, decide, 50)
    found["least_loaded_us"] = _of_least_loaded(islands)
    found["keys_us"] = microseconds(lambda: PromptKeys(prompts[0], PAGE).first(PROMPT // PAGE), 10)
    await islands.close()
    return found


def _under_traffic(islands: Islands, decide: Callable[[], LinkPair], number: int) -> float:
    """Microseconds in which it decides, places the request, ends the oldest of REQUESTS, and takes a report: each time
    another worker's. All requests have ended behind it."""
    numbers = itertools.count()
    links = itertools.cycle(islands.links().values())
    reports = itertools.cycle([
        worker_pb2.WorkerReport(rows=rows, token_seconds=0.008, prompt_tokens_per_second=RATE) for rows in range(9)
    ])  # fmt: skip
    placed: deque[tuple[str, LinkPair]] = deque()

    def step() -> None:
        name, pair = str(next(numbers)), decide()
        pair.decode.load += PROMPT + 100
        pair.prefill.load += PROMPT
        pair.prefill.expect_prompt(name, PROMPT)
        placed.append((name, pair))
        if len(placed) > REQUESTS:
            end(*placed.popleft())
        next(links).report = next(reports)

    def end(name: str, pair: LinkPair) -> None:
        pair.prefill.forget_prompt(name)
        pair.decode.load -= PROMPT + 100
        pair.prefill.load -= PROMPT

    found = microseconds(step, number)
    for one in placed:
        end(*one)
    return found


def _of_least_loaded(islands: Islands) -> float:
    islands._policy = POLICIES["least_loaded"]
    return microseconds(lambda: next(islands.pairs(Ask(PROMPT, 100))), 200)


# Policies


@dataclass(eq=False)
class Turn:
    """One request. key names: pages of the prompt, one int each."""

    arrived: float
    pages: list[int]
    chat: "Chat"
    missing: int = 0
    worker: "Worker | None" = None
    expected: int = 0  # tokens to compute, as the router thinks


@dataclass(eq=False)
class Chat:
    pages: list[int]
    turns: list[tuple[int, int]]  # pages of question and answer
    pause: float


class Worker:
    """A prefill worker: batches of prompts, and an LRU index of pages."""

    def __init__(self, pe: int, num_pages: int) -> None:
        self.pe = pe
        self.num_pages = num_pages
        self.held: OrderedDict[int, None] = OrderedDict()
        self.changes: tuple[list[int], list[int]] = ([], [])
        self.waiting: list[Turn] = []
        self.awaited = 0
        self.busy = False
        self.computed = 0

    def match(self, pages: Sequence[int]) -> int:
        return next((number for number, page in enumerate(pages) if page not in self.held), len(pages))

    def publish(self, pages: Sequence[int]) -> None:
        for page in reversed(pages):
            if page not in self.held:
                self.changes[0].append(page)
            self.held[page] = None
            self.held.move_to_end(page)
        while len(self.held) > self.num_pages:
            self.changes[1].append(self.held.popitem(last=False)[0])

    def batch(self) -> tuple[list[Turn], float]:
        taken, tokens = [], 0
        while self.waiting and tokens < BATCH_TOKENS:
            turn = self.waiting.pop(0)
            turn.missing = len(turn.pages) - min(self.match(turn.pages), len(turn.pages) - 1)
            tokens += turn.missing * PAGE
            taken.append(turn)
        self.computed += tokens
        return taken, max(STEP_SECONDS, tokens / RATE)


@dataclass
class Known:
    """PromptKeys of a simulated prompt."""

    keys: list[int]
    page_size: int = PAGE
    num_pages: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_pages = len(self.keys) - 1

    def first(self, count: int) -> list[int]:
        return self.keys


class Simulation:
    """Events in the order of their times, on `workers` and one decode worker that is never full."""

    def __init__(self, policy: Policy, num_workers: int, num_pages: int) -> None:
        self._policy = policy
        self.workers = [Worker(pe, num_pages) for pe in range(num_workers)]
        self._view: PrefixView[tuple[str, int]] = PrefixView()
        self._events: list[tuple[float, int, Any]] = []
        self._number = 0
        self._placed = 0
        self._ideal: set[int] = set()
        self._fresh = 0
        self.waits: list[float] = []
        self.ideal = 0

    def at(self, when: float, what: Any) -> None:
        self._number += 1
        heapq.heappush(self._events, (when, self._number, what))

    def fresh(self, pages: int) -> list[int]:
        self._fresh += pages
        return list(range(self._fresh - pages, self._fresh))

    def run(self, chats: Sequence[tuple[float, Chat]]) -> dict[str, float]:
        for when, chat in chats:
            self.at(when, lambda now, chat=chat: self._ask(now, chat))
        self.at(0.0, self._report)
        while self._events:
            when, _, what = heapq.heappop(self._events)
            what(when)
        computed = sum(worker.computed for worker in self.workers)
        most = max(worker.computed for worker in self.workers)
        return {
            "computed_over_ideal": computed / self.ideal,
            "first_token_p50_ms": 1e3 * percentile(self.waits, 50),
            "first_token_p99_ms": 1e3 * percentile(self.waits, 99),
            "busiest_worker": most * len(self.workers) / computed,
        }

    def _report(self, now: float) -> None:
        for worker in self.workers:
            added, removed = worker.changes
            gone = [page for page in removed if page not in worker.held]
            come = [page for page in added if page in worker.held]
            worker.changes = ([], [])
            names = [np.array(keys, "<u8").tobytes() for keys in (come, gone)]
            self._view.apply(("i", worker.pe), worker_pb2.WorkerReport(added=names[0], removed=names[1]))
        if self._events:
            self.at(now + REPORT_SECONDS, self._report)

    def _ask(self, now: float, chat: Chat) -> None:
        question, _ = chat.turns[0]
        chat.pages = chat.pages + self.fresh(question)
        turn = Turn(now, chat.pages, chat)
        known = next((n for n in range(len(turn.pages), 0, -1) if turn.pages[n - 1] in self._ideal), 0)
        self.ideal += (len(turn.pages) - known) * PAGE
        self._ideal.update(turn.pages)
        matches = self._view.match(Known(turn.pages))  # type: ignore[arg-type]
        loads = [
            WorkerLoad("i", one.pe, Role.PREFILL, one.awaited, True, prompt_tokens=one.awaited) for one in self.workers
        ]
        loads.append(WorkerLoad("i", len(loads), Role.DECODE, 0, True))
        self._placed += 1
        tokens = len(turn.pages) * PAGE
        pair = next(self._policy(loads, Ask(tokens, 100, matches), self._placed))
        worker = turn.worker = self.workers[pair.prefill.pe]
        turn.expected = tokens - matches.get(pair.prefill.key, 0)
        worker.awaited += turn.expected
        worker.waiting.append(turn)
        self._step(now, worker)

    def _step(self, now: float, worker: Worker) -> None:
        if worker.busy or not worker.waiting:
            return
        worker.busy = True
        taken, seconds = worker.batch()
        self.at(now + seconds, lambda then: self._done(then, worker, taken))

    def _done(self, now: float, worker: Worker, taken: list[Turn]) -> None:
        worker.busy = False
        for turn in taken:
            worker.publish(turn.pages)
            worker.awaited -= turn.expected
            self.waits.append(now - turn.arrived)
            chat = turn.chat
            (_, answer), chat.turns = chat.turns[0], chat.turns[1:]
            chat.pages = chat.pages + self.fresh(answer)
            if chat.turns:
                self.at(now + answer * PAGE * TOKEN_SECONDS + chat.pause, lambda then, chat=chat: self._ask(then, chat))
        self._step(now, worker)


def chats(simulation: Simulation, count: int, seconds: float, seed: int) -> list[tuple[float, Chat]]:
    """Arriving within so many seconds; 10 turns on one of 8 system prompts of 512 to 2,048 tokens."""
    draw = random.Random(seed)
    systems = [simulation.fresh(draw.randint(32, 128)) for _ in range(8)]
    found = []
    for _ in range(count):
        turns = [(draw.randint(4, 40), draw.randint(4, 24)) for _ in range(10)]
        found.append((draw.uniform(0, seconds), Chat(list(draw.choice(systems)), turns, draw.expovariate(1 / 2.0))))
    return found


def hot(simulation: Simulation, count: int, seconds: float, seed: int) -> list[tuple[float, Chat]]:
    """One question each behind the same 8,000 tokens."""
    draw = random.Random(seed)
    prefix = simulation.fresh(500)
    return [(draw.uniform(0, seconds), Chat(list(prefix), [(draw.randint(4, 40), 8)], 0.0)) for _ in range(count)]


def policies(names: Sequence[str]) -> dict[str, Any]:
    cases: dict[str, tuple[Any, int, float, int]] = {
        "chats at 60 %": (chats, 1000, 60.0, 1 << 20),
        "chats at 90 %": (chats, 1000, 40.0, 1 << 20),
        "chats at 60 %, a quarter of the memory": (chats, 1000, 60.0, 16_384),
        "hot prefix": (hot, 6000, 20.0, 1 << 20),
    }
    found: dict[str, Any] = {}
    for case, (traffic, count, seconds, num_pages) in cases.items():
        found[case] = {}
        for name in names:
            simulation = Simulation(POLICIES[name], 4, num_pages)
            found[case][name] = simulation.run(traffic(simulation, count, seconds, 1))
            load = simulation.ideal / (RATE * len(simulation.workers) * seconds)
            found[case][name]["ideal_load"] = load
    return found


def main() -> None:
    parser = benchmark_parser(__file__, __doc__)
    add_list(parser, "--only", default=PARTS, choices=PARTS)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    targets = []
    if "decision" in options.only:
        results["decision"] = found = asyncio.run(decisions())
        worst = max(found["none_held_us"], found["held_us"])
        targets.append(at_most("a decision at 64 workers and a million pages, µs", worst, 50))
    if "policies" in options.only:
        results["policies"] = policies(list(POLICIES))
    print_result(results | {"targets": targets}, options)


if __name__ == "__main__":
    main()
