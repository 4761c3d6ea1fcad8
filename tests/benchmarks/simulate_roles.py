"""Simulates two workers under open-loop traffic, to compare roles and tune the cost model without a GPU. Prints JSON.

Routing code and the choice of chunks are the real ones: policies, cost model, moves and TokenPace. Workers are models
of one H200 with Qwen3-8B: a step takes what its rows' and its chunks' products take, with the padding of CUDA graphs,
and what it takes to read its positions' KV (mixed_steps.py).
Goodput is the highest arrival rate at which nine requests in ten meet the SLO: the time to the first token, and the
90th percentile of the request's gaps between tokens.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np

from tandem.cluster.routing.cost_model import adaptive
from tandem.cluster.routing.policy import Ask, Policy, WorkerLoad, least_loaded
from tandem.cluster.routing.rebalance import moves
from tandem.workers.config import Role
from tandem.workers.runner.batch_buckets import MIXED_ROWS, MIXED_TOKENS, GraphSizes, prompt_sizes
from tandem.workers.scheduling.step_time import NOTHING
from tandem.workers.scheduling.token_pace import TokenPace
from tests.benchmarks.options import add_list, benchmark_parser
from tests.benchmarks.results import print_result

GAP_SECONDS = 0.015
GOOD = 0.9
ROUNDS = 7
ROLES = ("split", "colocated", "adaptive")
REPORT_SECONDS = 0.02
MOVE_SECONDS = 0.25
HANDOFF_SECONDS = 0.003
PROMPT_RATE = 39_000.0  # tokens a second of long chunks
POSITION_SECONDS = 32e-9  # to read one position's KV
MIXED_SECONDS = 0.0008  # what a forward of both takes beyond their products: two kernels for attention, padding
BATCH_TOKENS = 8192
MAX_ROWS = 512
NOISE = 0.02  # of the logarithm of a step's seconds
PAIR_SECONDS = 1.2e-9  # of a prompt token and a position that it attends to, in steps with rows
SIZES = GraphSizes(
    rows=MIXED_ROWS,
    chunks=tuple(size for size in prompt_sizes(BATCH_TOKENS, 4096) if MIXED_TOKENS[0] <= size <= MIXED_TOKENS[1]),
    prompts=tuple(prompt_sizes(BATCH_TOKENS, 4096)),
)
ROWS = (1, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
SECONDS = (0.0038, 0.0046, 0.0047, 0.0048, 0.0059, 0.0083, 0.0145, 0.0272, 0.0535, 0.106, 0.211)  # of their products


def products(rows: int) -> float:
    return float(np.interp(rows, ROWS, SECONDS))


Seen = dict[str, float]
Draw = Callable[[np.random.Generator, int], np.ndarray]


class Mix(NamedTuple):
    """The requests that people send."""

    prompts: Draw
    first_token_seconds: float  # the SLO
    most: float  # requests a second that two workers cannot serve


def lognormal(median: float, sigma: float, cap: int) -> Draw:
    return lambda random, n: np.clip(random.lognormal(math.log(median), sigma, n), 1, cap).astype(int)


def uniform(low: int, high: int) -> Draw:
    return lambda random, n: random.integers(low, high + 1, n)


MIXES = {
    "A": Mix(lognormal(800, 0.8, 8192), 0.5, 64),
    "A2": Mix(uniform(512, 1536), 0.5, 64),
    "B": Mix(lognormal(8000, 0.25, 16000), 2.0, 10),
    "C": Mix(uniform(96, 160), 0.5, 200),
}


Asker = TypeVar("Asker")


def share_out(budget: int, asked: Sequence[tuple[Asker, int]]) -> tuple[list[tuple[Asker, int]], int]:
    """The tokens of each prompt in the next step, in order, of so many that each still has; and their sum."""
    chunks, total = [], 0
    for asker, left in asked:
        tokens = min(budget - total, left)
        if tokens:
            chunks.append((asker, tokens))
            total += tokens
    return chunks, total


@dataclass(eq=False)
class Request:
    arrived: float
    prompt: int
    output: int
    tokens: list[float] = field(default_factory=list)  # when each came
    computed: int = 0
    decode: "Worker | None" = None
    moves: int = 0


class Worker:
    """One GPU. `fused`: a chunk and the rows beside it are one forward."""

    def __init__(self, pe: int, role: Role, fused: bool) -> None:
        self.pe, self.role, self.fused = pe, role, fused
        self.time = 0.0
        self.prompts: deque[Request] = deque()
        self.rows: list[Request] = []
        self.arriving: list[tuple[float, Request]] = []  # handed over, from then on
        self.leaving: list[Request] = []
        self.token_seconds = 0.0
        self.pending = 0
        self.pace = TokenPace(GAP_SECONDS, BATCH_TOKENS, sizes=SIZES._replace(joint=fused))
        self.random = np.random.default_rng(pe)
        self.stepping = False

    def step(self) -> list[Request]:
        """One turn of the loop, from self.time on. Prompts that are computed."""
        for when, request in list(self.arriving):
            if when <= self.time:
                self.arriving.remove((when, request))
                self.rows.append(request)
        if not self.rows and not self.prompts:
            return []
        positions = sum(row.prompt + len(row.tokens) for row in self.rows)
        rows = len(self.rows)
        chunks, total = self._chunks(positions)
        joint = self.fused and bool(rows) and self.pace.is_joint(rows, total)
        pairs = sum(tokens * (request.computed + tokens // 2) for request, tokens in chunks)
        beside = self.pace.forward_load(total, joint=joint)._replace(pairs=pairs) if total else NOTHING
        load = self.pace.step_load(rows, positions, beside)
        seconds = positions * POSITION_SECONDS + (MIXED_SECONDS if load.joint else 0)
        seconds += sum(products(tokens) for tokens in (load.rows + load.joint, load.apart) if tokens)
        seconds += pairs * PAIR_SECONDS if rows else 0  # PROMPT_RATE and SECONDS of long forwards have it
        seconds *= self.random.lognormal(0, NOISE)
        if rows and self.stepping:
            self.pace.measured(seconds, load)
        self.stepping = rows > 0
        if rows:
            self.token_seconds = seconds if not self.token_seconds else 0.8 * self.token_seconds + 0.2 * seconds
        self.time += seconds
        for row in self.rows:
            row.tokens.append(self.time)
        self.rows = [row for row in self.rows if len(row.tokens) < row.output]
        done = []
        for request, tokens in chunks:
            request.computed += tokens
            self.pending -= tokens
            if request.computed == request.prompt:
                self.prompts.remove(request)
                request.tokens.append(self.time)
                done.append(request)
        return done

    def _chunks(self, positions: int) -> tuple[list[tuple[Request, int]], int]:
        budget = BATCH_TOKENS
        if self.rows and self.prompts:
            budget = self.pace.chunk_tokens(len(self.rows), positions, self.prompts[0].computed)
        return share_out(budget, [(request, request.prompt - request.computed) for request in self.prompts])

    def load(self) -> WorkerLoad:
        positions = sum(row.prompt + len(row.tokens) for row in self.rows)
        return WorkerLoad(
            "i",
            self.pe,
            self.role,
            sum(row.prompt + row.output for row in self.rows) + self.pending,
            True,
            self.pending,
            len(self.rows) + len(self.arriving),
            token_seconds=self.token_seconds,
            prompt_rate=PROMPT_RATE,
            prompt_rate_beside_rows=self.pace.prompt_rate(len(self.rows), positions) if self.rows else 0.0,
        )


def simulate(mix: Mix, rate: float, roles: str, fused: bool, seconds: float, seed: int = 1) -> tuple[float, Seen]:
    """The fraction of requests that meet the SLO, and what else is to be seen."""
    random = np.random.default_rng(seed)
    n = int(rate * seconds)
    arrivals = np.cumsum(random.exponential(1 / rate, n))
    requests = [
        Request(*one)
        for one in zip(
            arrivals.tolist(), mix.prompts(random, n).tolist(), random.integers(128, 385, n).tolist(), strict=True
        )
    ]
    workers = [Worker(0, Role.PREFILL, fused), Worker(1, Role.DECODE, fused)]
    policy: Policy = least_loaded if roles == "split" else adaptive(GAP_SECONDS, colocated=roles == "colocated")
    loads, reported, moved, local, kept, num_moves = [w.load() for w in workers], 0.0, 0.0, 0, 0, 0
    todo: deque[Request] = deque(requests)
    since: dict[int, int] = {0: 0, 1: 0}  # prompt tokens placed since the last report
    while todo or any(w.prompts or w.rows or w.arriving for w in workers):
        worker = min(workers, key=lambda one: one.time)
        now = worker.time
        while todo and todo[0].arrived <= now:
            request = todo.popleft()
            view = [load._replace(prompt_tokens=load.prompt_tokens + since[load.pe]) for load in loads]
            best = next(policy(view, Ask(request.prompt, request.output), 0))
            pair = (workers[best.decode.pe], workers[best.prefill.pe])
            local += pair[0] is pair[1] and pair[0].role == Role.DECODE
            kept += pair[0] is pair[1] and pair[0].role == Role.PREFILL
            request.decode = pair[0]
            pair[1].prompts.append(request)
            pair[1].pending += request.prompt
            since[pair[1].pe] += request.prompt
        for request in worker.step():
            assert request.decode is not None
            request.decode.arriving.append(
                (worker.time + (0 if request.decode is worker else HANDOFF_SECONDS), request)
            )
        if worker.time == now:  # nothing to do
            later = [w.time for w in workers if w.time > now] + [when for when, _ in worker.arriving]
            later += [todo[0].arrived] if todo else []
            worker.time = max(now + 1e-5, min(later, default=now))
        if now - reported > REPORT_SECONDS:
            loads, reported, since = [w.load() for w in workers], now, {0: 0, 1: 0}
        if roles == "adaptive" and now - moved > MOVE_SECONDS:
            moved = now
            for move in moves(loads, GAP_SECONDS):
                source, target = workers[move.source.pe], workers[move.target.pe]
                for row in sorted(source.rows, key=lambda r: len(r.tokens) - r.output)[: move.num_requests]:
                    if row.moves < 4 and row.output - len(row.tokens) >= 16:
                        row.moves += 1
                        num_moves += 1
                        source.rows.remove(row)
                        target.arriving.append((max(source.time, target.time) + 2 * HANDOFF_SECONDS, row))
    counted = requests[n // 8 :]
    first = np.array([r.tokens[0] - r.arrived for r in counted])
    gaps = np.array([np.percentile(np.diff(r.tokens), 90) if len(r.tokens) > 1 else 0.0 for r in counted])
    good = float(((first <= mix.first_token_seconds) & (gaps <= GAP_SECONDS)).mean())
    seen = {"first_p90": float(np.percentile(first, 90)), "gap_p90": float(np.percentile(gaps, 90))}
    return good, seen | {"local": local / n, "kept": kept / n, "moves": num_moves / n}


def goodput(mix: Mix, roles: str, fused: bool, seconds: float) -> dict[str, float]:
    """Finds the goodput by bisection, with the figures at that rate."""
    low, high, best = 0.0, mix.most, {}
    for _ in range(ROUNDS):
        rate = (low + high) / 2
        good, seen = simulate(mix, rate, roles, fused, seconds)
        if good >= GOOD:
            low, best = rate, seen
        else:
            high = rate
    return {"goodput": round(low, 2)} | {key: round(value, 4) for key, value in best.items()}


def main() -> None:
    parser = benchmark_parser(__file__, __doc__)
    add_list(parser, "--mix", default=tuple(MIXES), choices=tuple(MIXES))
    add_list(parser, "--roles", default=ROLES, choices=ROLES)
    parser.add_argument("--apart", action="store_true", help="a chunk and the rows beside it are two forwards")
    parser.add_argument("--simulated-seconds", type=float, default=60.0, help="of each rate")
    options = parser.parse_args()
    result = {
        f"{name} {roles}": goodput(MIXES[name], roles, not options.apart, options.simulated_seconds)
        for name in options.mix
        for roles in options.roles
    }
    print_result(result, options)


if __name__ == "__main__":
    main()
