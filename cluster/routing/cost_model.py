"""Roles by load: which worker computes a prompt and which decodes it, by what both cost.

Each pair of workers of an island has a cost in seconds:

    first token     prompts ahead of it and its own, at the prefill worker's measured rate
    push            what pushes between the two workers' hosts have added of late
    others' tokens  a prompt computed beside decode rows holds up each of those rows
    others' prompts a row decoded beside prompts takes its steps from them
    own tokens      what the decode worker takes for a token, above all beyond the bound

The weights say what a second of each is worth in seconds of the first token.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from tandem.cluster.routing.policy import Ask, Pair, Policy, WorkerLoad
from tandem.workers.config import Role
from tandem.workers.scheduling.step_time import FIRST_RATE

ROW_WEIGHT = 0.05  # a second by which one decode row is held up
TOKEN_WEIGHT = 0.05  # a second of the request's own decoding within the bound
LONGEST_OUTPUT = 512  # tokens that a request is expected to use of max_tokens, at most
WAITING_SECONDS = 0.25  # of prompts with which a worker has no time for rows
LEAST_WAITING = 0.02  # future prompts that a row would hold up, if none waits
LEAST_SHARE = 0.25  # of a worker with decode rows, for prompts
LONE_STEP = 0.5  # a step of few rows as a fraction of the bound, unless a shorter one was measured


def adaptive(token_seconds: float, *, colocated: bool = False) -> Policy:
    """Makes the policy. token_seconds: the bound on the time from one token to the next. colocated: each worker
    computes the prompts of the requests that it decodes, and no others."""

    def policy(workers: Sequence[WorkerLoad], ask: Ask, turn: int) -> Iterator[Pair]:
        islands: defaultdict[str, list[WorkerLoad]] = defaultdict(list)
        for worker in workers:
            if worker.reachable:
                islands[worker.island].append(worker)
        ranked: list[tuple[float, Pair]] = []
        for members in islands.values():
            island = _Island(members, ask, token_seconds)
            ranked += island.same_workers() if colocated else island.pairs()
        ranked.sort(key=lambda one: one[0])
        return (pair for _, pair in ranked)

    return policy


class _Island:
    """One island's workers and their costs for a request."""

    def __init__(self, workers: Sequence[WorkerLoad], ask: Ask, bound: float) -> None:
        self._workers = workers
        self._ask = ask
        self._bound = bound
        measured = max(one.prompt_rate for one in workers)
        self._rate = measured if measured >= 1 else FIRST_RATE  # of a worker without rows
        self._step = min((LONE_STEP * bound, *(one.token_seconds for one in workers if one.token_seconds)))
        self._output = min(ask.max_tokens, LONGEST_OUTPUT)

    def pairs(self) -> list[tuple[float, Pair]]:
        """Returns (cost, pair): each worker as the decoder, with the best prefill worker for it and with itself."""
        workers, pushes = self._workers, bool(self._ask.pushes)
        waits = [self._first_token(one) for one in workers]
        prompts = [wait + self._holds_up_rows(one) for wait, one in zip(waits, workers, strict=True)]
        by_cost = sorted(range(len(workers)), key=prompts.__getitem__)
        ranked = []
        for itself, decode in enumerate(workers):
            steps, tokens = self._holds_up_prompts(decode), self._tokens(decode)
            added = [self._ask.push_seconds(one, decode) for one in workers] if pushes else [0.0] * len(workers)
            others = (one for one in by_cost if one != itself)
            if pushes:
                other = min(others, key=lambda one, added=added: prompts[one] + added[one], default=None)
            else:
                other = next(others, None)
            for prefill in (itself,) if other is None else (other, itself):
                pair = Pair(decode, workers[prefill], waits[prefill] + added[prefill])
                ranked.append((prompts[prefill] + added[prefill] + steps + tokens, pair))
        return ranked

    def same_workers(self) -> list[tuple[float, Pair]]:
        """Returns (cost, pair): each worker for both, whatever its main role."""
        ranked = []
        for one in self._workers:
            expected = self._first_token(one)
            ranked.append((expected + self._holds_up_rows(one) + self._tokens(one), Pair(one, one, expected)))
        return ranked

    def _tokens(self, decode: WorkerLoad) -> float:
        """Returns the cost of the request's own tokens. Time beyond the bound counts most."""
        own = self._token_seconds(decode)
        return self._output * (TOKEN_WEIGHT * own + max(0.0, own - self._bound))

    def _to_compute(self, worker: WorkerLoad) -> int:
        return max(1, self._ask.prompt_tokens - self._ask.matches.get(worker.key, 0))

    def _first_token(self, prefill: WorkerLoad) -> float:
        rate = self._rate
        if prefill.rows and prefill.prompt_rate_beside_rows >= 1:
            rate = min(rate, prefill.prompt_rate_beside_rows)
        elif prefill.rows:
            rate *= max(LEAST_SHARE, 1 - prefill.token_seconds / self._bound)
        return (prefill.prompt_tokens + self._to_compute(prefill)) / rate

    def _holds_up_rows(self, prefill: WorkerLoad) -> float:
        return ROW_WEIGHT * (prefill.rows + prefill.parked) * self._to_compute(prefill) / self._rate

    def _holds_up_prompts(self, decode: WorkerLoad) -> float:
        """Returns the cost of steps that the request adds on a worker whose time prompts need. Present rows pay for
        most of them."""
        if decode.role == Role.DECODE:
            return 0.0
        waiting = min(1.0, max(LEAST_WAITING, decode.prompt_tokens / self._rate / WAITING_SECONDS))
        return waiting * self._output * self._step / (decode.rows + 1)

    def _token_seconds(self, decode: WorkerLoad) -> float:
        if decode.prompt_tokens and not decode.rows:
            return self._bound  # its chunks will fill the time up to the bound
        measured = decode.token_seconds if decode.rows else self._step
        return measured * (1 + decode.parked / max(decode.rows, 1))  # parked sequences come back, and have steps
