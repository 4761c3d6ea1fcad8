"""Clients that load a gateway, in processes of their own: one could not read what a gateway writes.

Such a process, main(), sends what each line of its input says, a Share, and answers with a line of what came of it, an
Outcome.
"""

import asyncio
import itertools
import json
import random
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import asdict, dataclass
from functools import partial
from typing import Self

from tandem.cluster.client import AsyncClient
from tandem.cluster.tools.bench.event_streams import HttpConnections
from tandem.cluster.tools.bench.openai import COMPLETIONS, LAST
from tests.benchmarks.results import percentile, rounded

REQUEST_SECONDS = 600.0
LOWEST_TOKEN = 10  # below it are often special ones


@dataclass(frozen=True)
class Served:
    """One request: seconds of a clock that all processes share, at its call and at the arrival of each token."""

    called: float
    arrivals: list[float]

    @property
    def gaps(self) -> list[float]:
        """Between messages; those that bring several tokens count once."""
        return [later - earlier for earlier, later in itertools.pairwise(self.arrivals) if later > earlier]


@dataclass(frozen=True)
class Outcome:
    """The outcome of one Share. busy: the part of a core that its process took meanwhile; near 1 it is what is
    measured."""

    served: list[Served]
    busy: float


Request = Callable[[], Awaitable[Served]]
Stream = Callable[[list[int], int], Awaitable[list[float]]]  # a prompt, a number of tokens; when each came


@dataclass(frozen=True)
class Share:
    """The requests that one process sends: a closed loop of `clients`.

    address: of the gateway's gRPC server; http: of the HTTP server, through which requests go if it is given. prompt:
    tokens of each; output: the mean. Each output has half to one and a half of the mean, for requests of one length
    come and go in waves. seed decides prompts and lengths.
    """

    address: str
    prompt: int
    output: int
    requests: int
    seed: int
    clients: int
    http: str = ""
    connections: int = 1  # over gRPC

    async def run(self) -> Outcome:
        http = HttpConnections(f"http://{self.http or self.address}", token=None)
        async with AsyncExitStack() as stack, aclosing(http):
            clients = [await stack.enter_async_context(AsyncClient(self.address)) for _ in range(self.connections)]
            vocabularies = [(await client.model_info()).vocab_size for client in clients]  # all are connected now
            tokens = range(LOWEST_TOKEN, vocabularies[0])
            draw = random.Random(self.seed)
            prompts = [draw.choices(tokens, k=self.prompt) for _ in range(self.requests)]
            lengths = [draw.randint(-(-self.output // 2), self.output * 3 // 2) for _ in prompts]
            over_http = partial(_http_arrivals, http)
            over_grpc = itertools.cycle([partial(_arrivals, client) for client in clients])
            requests = [
                partial(_served, over_http if self.http else next(over_grpc), *each)
                for each in zip(prompts, lengths, strict=True)
            ]
            began, used = time.perf_counter(), time.process_time()
            served = await self._closed_loop(requests)
            busy = (time.process_time() - used) / (time.perf_counter() - began)
        return Outcome(served, busy)

    async def _closed_loop(self, requests: Sequence[Request]) -> list[Served]:
        left, served = iter(requests), list[Served]()

        async def one() -> None:
            for request in left:
                served.append(await request())

        await asyncio.gather(*(one() for _ in range(self.clients)))
        return served


async def _served(stream: Stream, prompt: list[int], count: int) -> Served:
    called = time.perf_counter()
    return Served(called, await stream(prompt, count))


async def _arrivals(client: AsyncClient, prompt: list[int], count: int) -> list[float]:
    arrivals: list[float] = []
    async for update in client.generate(
        prompt, timeout=REQUEST_SECONDS, max_tokens=count, temperature=0, ignore_eos=True
    ):
        arrivals += itertools.repeat(time.perf_counter(), len(update.token_ids))
    return arrivals


async def _http_arrivals(http: HttpConnections, prompt: list[int], count: int) -> list[float]:
    arrivals: list[float] = []

    def take(data: bytes) -> None:
        if data != LAST:
            token_ids = json.loads(data)["choices"][0]["token_ids"]
            arrivals.extend(itertools.repeat(time.perf_counter(), len(token_ids)))

    wanted = {"max_tokens": count, "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
    body = json.dumps({"prompt": prompt, **wanted}).encode()
    async with asyncio.timeout(REQUEST_SECONDS):
        await http.call("POST", COMPLETIONS, body, take)
    return arrivals


def numbers_of(outcome: Outcome) -> dict[str, float]:
    """Returns the numbers of one load, whichever processes it came from."""
    served = outcome.served
    arrivals = [at for one in served for at in one.arrivals]
    began, ended = min(one.called for one in served), max(arrivals)
    quarter = (ended - began) / 4
    milliseconds = {
        "ttft": [one.arrivals[0] - one.called for one in served],
        "tpot": [(one.arrivals[-1] - one.arrivals[0]) / max(1, len(one.arrivals) - 1) for one in served],
        "gap": [gap for one in served for gap in one.gaps] or [0.0],
        "stall": [max(one.gaps, default=0.0) for one in served],
    }
    numbers: dict[str, float] = {"requests": len(served)}
    for name, values in milliseconds.items():
        numbers |= {f"{name}_p{share}_ms": percentile(values, share) * 1e3 for share in (50, 99)}
    for name, times in {"tokens": arrivals, "requests": [one.arrivals[0] for one in served]}.items():
        middle = [at for at in times if began + quarter <= at < ended - quarter]
        numbers |= {f"{name}_s": len(times) / (ended - began), f"middle_{name}_s": len(middle) / (2 * quarter)}
    numbers["tokens_a_message"] = len(arrivals) / sum(1 + len(one.gaps) for one in served)
    numbers["busy"] = outcome.busy
    return {name: rounded(value) for name, value in numbers.items()}


class LoadProcesses:
    """They have started when the constructor returns. Used as a context."""

    def __init__(self, count: int) -> None:
        command = [sys.executable, "-c", "from tests.benchmarks import load; load.main()"]
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(count)
        ]
        self._ask([""] * count)

    def run(self, shares: Sequence[Share]) -> Outcome:
        """All at once, at most one for each process. What came of them together; busy: of the busiest."""
        answers = [json.loads(answer) for answer in self._ask([json.dumps(asdict(share)) for share in shares])]
        served = [Served(**one) for answer in answers for one in answer["served"]]
        return Outcome(served, max(answer["busy"] for answer in answers))

    def _ask(self, lines: Sequence[str]) -> list[str]:
        asked = self._processes[: len(lines)]
        for process, line in zip(asked, lines, strict=True):
            assert process.stdin is not None
            process.stdin.write(f"{line}\n")
            process.stdin.flush()
        return [_answer(process) for process in asked]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.communicate()


def _answer(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    answer = process.stdout.readline()
    if not answer:
        raise RuntimeError(f"a process of clients ended with exit code {process.wait()}")
    return answer


def main() -> None:
    for line in sys.stdin:
        outcome = asyncio.run(Share(**json.loads(line)).run()) if line.strip() else Outcome([], 0.0)
        print(json.dumps(asdict(outcome)), flush=True)
