"""Simulates a worker that computes prompts and decodes, with and without drafts, under open-loop traffic. Prints JSON.

The choice of chunks and the policy of drafts are the real ones. The device is one H200 with Qwen3-8B: steps as in
simulate_roles, and what drafted tokens add by verify_steps. Steps with chunks verify nothing, as with CUDA graphs.

For each mix, method and rate, a part of what the worker serves without drafts:

    good                requests within the service level
    token_ms            mean over requests: from the first token to the last ÷ tokens but the first
    token_to_off        ÷ that without drafts
    messages_tokens     tokens a message
    beside, verifying   steps with rows that had chunks, and that verified drafts
    follow              verify steps that were launched before the one before was read
    kept                steps with rows and chunks within token_seconds

What a head or a draft model adds to a prompt's token, and a draft model to a step, is a guess: by its weights.
"""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from tandem.workers.engine.capabilities import Capabilities
from tandem.workers.engine.engine import Engine
from tandem.workers.requests.decode_request import DecodeRequest
from tandem.workers.sampling.sampling_params import SamplingParams
from tandem.workers.scheduling.step_time import NOTHING, StepLoad
from tandem.workers.scheduling.token_pace import TokenPace
from tandem.workers.speculation.draft_policy import DraftPolicy
from tandem.workers.wire.prompt_spec import PromptSpec
from tests.benchmarks.measured import rounded
from tests.benchmarks.options import add_list, benchmark_parser
from tests.benchmarks.results import print_result
from tests.benchmarks.simulate_roles import (
    BATCH_TOKENS,
    GAP_SECONDS,
    GOOD,
    MIXED_SECONDS,
    MIXES,
    NOISE,
    PAIR_SECONDS,
    POSITION_SECONDS,
    SIZES,
    Mix,
    products,
    share_out,
)
from tests.support.prompt_specs import spec_of

OFF = "off"
METHODS = (OFF, "ngram", "eagle3", "draft_model")
PARTS = (0.25, 0.5, 0.75, 0.95, 1.0)
ROUNDS = 9
READ_SECONDS = 0.0006  # the device waits for the host, where nothing may be launched behind a verify step
# What drafted tokens add to a plain step, in ms by their number (verify_steps), and what models add to each step and to
# a prompt token, in parts of the target's.
WAITING = ([0, 1, 3, 7, 24, 56, 96, 224], [0.0, 1.00, 1.00, 1.78, 2.49, 3.63, 5.69, 12.1])
FOLLOWING = ([0, 1, 3, 7, 24, 56, 96, 224], [0.0, 0.30, 0.35, 0.74, 0.75, 1.7, 2.6, 4.75])
HEAD_WAITING = ([1, 8, 32], [3.96, 5.68, 9.03])  # of an EAGLE-3 head with drafts of 3 tokens, by rows
HEAD_FOLLOWING = ([1, 8, 32, 64], [0.92, 1.29, 2.64, 5.0])
DRAFT_STEP_MS = {"eagle3": 0.0, "draft_model": 1.0}  # of each token of the longest draft
OWN_STEP_MS = {"eagle3": 0.2, "draft_model": 0.9}  # in each step in which the drafter takes part
OWN_PROMPT = {"eagle3": 0.03, "draft_model": 0.075}


@dataclass(eq=False)
class Request:
    """The parts of a request that a DraftPolicy reads, and when its tokens came."""

    arrived: float
    length: int
    max_tokens: int
    sequence_id: int = 0
    prompt: PromptSpec = field(default_factory=lambda: spec_of([0]))
    output: list[int] = field(default_factory=list)
    params: SamplingParams = field(default_factory=SamplingParams)
    ended: bool = False
    computed: int = 0
    times: list[float] = field(default_factory=list)  # of its messages

    @property
    def rule(self) -> Any:
        return SimpleNamespace(max_tokens=self.max_tokens)

    @property
    def num_left(self) -> int:
        return self.max_tokens - len(self.output)


class Worker:
    """One GPU. holds: probability of a drafted token."""

    def __init__(self, method: str, holds: float, tokens: int, step_tokens: int) -> None:
        self.method, self.holds = method, holds
        self.computes = method in DRAFT_STEP_MS
        follows = step_tokens - 1
        able = Capabilities(True, self.computes, follows, not self.computes)
        self.policy = DraftPolicy(
            cast(Engine, SimpleNamespace(capabilities=able)), tokens, step_tokens, computes=self.computes
        )
        self.pace = TokenPace(GAP_SECONDS, BATCH_TOKENS, sizes=SIZES)
        self.tokens = tokens
        self.before: list[Request] | None = None  # the rows of the last step, if it had no chunks
        self.time = 0.0
        self.prompts: deque[Request] = deque()
        self.rows: list[Request] = []
        self.draws, self.noise = random.Random(1), np.random.default_rng(2)
        self.stepping = False
        self.verified: list[Request] | None = None  # by the last step, and how many tokens each had
        self.sizes: dict[int, int] = {}
        self.lacks_outputs = False  # of a head, behind a step with chunks
        self.counts = dict.fromkeys(("steps", "beside", "verifying", "follow", "kept"), 0)

    def step(self) -> None:
        rows, positions = len(self.rows), sum(row.length + len(row.output) for row in self.rows)
        chunks, total = self._chunks(positions)
        joint = bool(rows and total) and self.pace.is_joint(rows, total)
        pairs = sum(tokens * (request.computed + tokens // 2) for request, tokens in chunks)
        beside = self.pace.forward_load(total, joint=joint)._replace(pairs=pairs) if total else NOTHING
        if rows and not joint:
            steady = self.rows is self.before and min(row.num_left for row in self.rows) > 2 * (self.tokens + 1)
            self.policy.stepped(steady=steady)
        self.before = None if joint else self.rows
        sizes = self._drafted() if rows and not joint and self.method != OFF else {}
        seconds = self._launch(sizes, joint=joint) + positions * POSITION_SECONDS
        load = self.pace.step_load(rows + sum(sizes.values()), positions, beside)
        seconds += self._forwards(load, rows) + (pairs * PAIR_SECONDS if rows else 0)
        seconds *= self.noise.lognormal(0, NOISE)
        if rows and self.stepping:
            self.pace.measured(seconds, load)
        self.stepping = rows > 0
        self.time += seconds
        self._count(seconds, load, sizes)
        self._deliver(sizes)
        for request, tokens in chunks:
            request.computed += tokens
            if request.computed == request.length:
                self.prompts.remove(request)
                request.output.append(0)
                request.times.append(self.time)
                self.rows = [*self.rows, request]

    def _count(self, seconds: float, load: StepLoad, sizes: dict[int, int]) -> None:
        if load.rows:
            self.counts["steps"] += 1
            self.counts["beside"] += load.chunk > 0
            self.counts["verifying"] += bool(sizes)
            self.counts["kept"] += load.chunk > 0 and seconds <= GAP_SECONDS

    def _forwards(self, load: StepLoad, rows: int) -> float:
        """Returns the seconds of plain rows and chunks."""
        own = 1 + OWN_PROMPT.get(self.method, 0)
        together = products(rows + load.joint if load.joint else rows) if rows else 0.0
        if load.joint:
            together += (own - 1) * (together - products(rows)) + MIXED_SECONDS
        return together + (own * products(load.apart) if load.apart else 0.0)

    def _launch(self, sizes: dict[int, int], *, joint: bool) -> float:
        """Returns the seconds that drafts add to the step."""
        follows = self.verified is not None and self.verified is self.rows and self._may_follow()
        verified, self.verified = self.verified is not None, self.rows if sizes else None
        self.sizes = sizes
        if not self.rows or self.method == OFF:
            return 0.0
        if not sizes:
            self.lacks_outputs = joint
            alone = not joint and self.computes and self.policy.gives_up(self._requests)
            return verified * READ_SECONDS + (0.0 if alone else OWN_STEP_MS.get(self.method, 0) / 1e3)
        self.counts["follow"] += follows
        if self.method == "eagle3":
            added = float(np.interp(sum(sizes.values()) / 3, *(HEAD_FOLLOWING if follows else HEAD_WAITING)))
            return (added + OWN_STEP_MS[self.method]) / 1e3
        added = float(np.interp(sum(sizes.values()), *(FOLLOWING if follows else WAITING)))
        chain = DRAFT_STEP_MS.get(self.method, 0.0) * max(sizes.values()) + OWN_STEP_MS.get(self.method, 0.0)
        chain += 0.0 if follows or not self.computes else 0.8  # the host launches each step, and reads the drafts
        return (added + chain) / 1e3

    def _may_follow(self) -> bool:
        ends = [len(row.output) for row in self.rows]
        return self.policy.can_follow(self._requests) and all(
            row.max_tokens > end + self.sizes.get(index, 0)
            for index, (row, end) in enumerate(zip(self.rows, ends, strict=True))
        )

    @property
    def _requests(self) -> Sequence[DecodeRequest]:
        return cast(Sequence[DecodeRequest], self.rows)

    def _drafted(self) -> dict[int, int]:
        if self.method == "eagle3" and self.lacks_outputs:
            self.lacks_outputs = False
            self.policy.launched(verifies=False)
            return {}
        sizes = self.policy.sizes(self._requests, [len(row.output) for row in self.rows])
        self.policy.launched(verifies=bool(sizes))
        return {index: size for index, size in sizes.items() if size}

    def _deliver(self, sizes: dict[int, int]) -> None:
        gone = False
        for index, row in enumerate(self.rows):
            drafted = sizes.get(index, 0)
            accepted = 0
            while accepted < drafted and self.draws.random() < self.holds:
                accepted += 1
            count = min(accepted + 1, row.num_left)
            if drafted:
                request = cast(DecodeRequest, row)
                self.policy.verified(request, drafted, min(count - 1, drafted), len(row.output) + count)
            row.output += [0] * count
            row.times.append(self.time)
            gone |= not row.num_left
        if gone:
            for row in self.rows:
                if not row.num_left:
                    self.policy.forget(cast(DecodeRequest, row))
            self.rows = [row for row in self.rows if row.num_left]

    def _chunks(self, positions: int) -> tuple[list[tuple[Request, int]], int]:
        budget = BATCH_TOKENS
        if self.rows and self.prompts:
            budget = self.pace.chunk_tokens(len(self.rows), positions, self.prompts[0].computed)
        return share_out(budget, [(request, request.length - request.computed) for request in self.prompts])


def simulate(mix: Mix, rate: float, worker: Worker, seconds: float, seed: int = 1) -> dict[str, float]:
    numbers = np.random.default_rng(seed)
    n = int(rate * seconds)
    arrivals = np.cumsum(numbers.exponential(1 / rate, n)).tolist()
    lengths, outputs = mix.prompts(numbers, n).tolist(), numbers.integers(128, 385, n).tolist()
    requests = [Request(*one) for one in zip(arrivals, lengths, outputs, strict=True)]
    todo = deque(requests)
    while todo or worker.prompts or worker.rows:
        while todo and todo[0].arrived <= worker.time:
            worker.prompts.append(todo.popleft())
        if worker.prompts or worker.rows:
            worker.step()
        else:
            worker.time = todo[0].arrived
            worker.stepping = False
    counted = requests[n // 8 :]
    first = np.array([row.times[0] - row.arrived for row in counted])
    gaps = np.array([np.percentile(np.diff(row.times), 90) for row in counted])
    tokens = np.array([(row.times[-1] - row.times[0]) / (row.max_tokens - 1) for row in counted])
    steps = worker.counts
    return {
        "good": float(((first <= mix.first_token_seconds) & (gaps <= GAP_SECONDS)).mean()),
        "token_ms": 1e3 * float(tokens.mean()),
        "gap_p90_ms": 1e3 * float(np.median(gaps)),
        "first_p90_ms": 1e3 * float(np.percentile(first, 90)),
        "messages_tokens": sum(row.max_tokens for row in counted) / sum(len(row.times) for row in counted),
        "beside": steps["beside"] / steps["steps"],
        "verifying": steps["verifying"] / steps["steps"],
        "follow": steps["follow"] / max(1, steps["verifying"]),
        "kept": steps["kept"] / max(1, steps["beside"]),
    }


def goodput(mix: Mix, seconds: float, *setting: Any) -> float:
    """Requests a second, by bisection."""
    low, high = 0.0, mix.most
    for _ in range(ROUNDS):
        rate = (low + high) / 2
        good = simulate(mix, rate, Worker(*setting), seconds)["good"]
        low, high = (rate, high) if good >= GOOD else (low, rate)
    return low


def main() -> None:
    parser = benchmark_parser(__file__, __doc__)
    add_list(parser, "--mix", default=tuple(MIXES), choices=tuple(MIXES))
    add_list(parser, "--methods", default=METHODS, choices=METHODS)
    add_list(parser, "--parts", float, default=PARTS, help="of what the worker serves without drafts")
    parser.add_argument("--holds", type=float, default=0.7, help="part of tried drafted tokens that holds")
    parser.add_argument("--tokens", type=int, default=3, help="most of a draft")
    parser.add_argument("--step-tokens", type=int, default=32, help="most of a step with drafts")
    parser.add_argument("--simulated-seconds", type=float, default=40.0, help="of each rate")
    parser.add_argument("--goodput", action="store_true", help="of each method, too")
    options = parser.parse_args()
    result: dict[str, Any] = {}
    for name in options.mix:
        mix, seconds = MIXES[name], options.simulated_seconds
        setting = options.holds, options.tokens, options.step_tokens
        most = goodput(mix, seconds, OFF, *setting)
        result[name] = {"goodput off": rounded(most)}
        for method in options.methods if options.goodput else ():
            if method != OFF:
                result[name][f"goodput {method}, to off"] = rounded(goodput(mix, seconds, method, *setting) / most)
        for part in options.parts:
            off = 0.0
            for method in dict.fromkeys((OFF, *options.methods)):
                seen = simulate(mix, part * most, Worker(method, *setting), seconds)
                off = off or seen["token_ms"]
                numbers = {key: rounded(value) for key, value in seen.items()}
                result[name][f"{part} {method}"] = numbers | {"token_to_off": rounded(seen["token_ms"] / off)}
    print_result(result, options)


if __name__ == "__main__":
    main()
