"""Clients that load a gateway, in processes of their own: one could not read what a gateway writes.

As a program it sends what each line of its input says, a Share, and answers with a line of what came of it.
"""

import asyncio
import itertools
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Self

from tandem.cluster.client import AsyncClient

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
class Share:
    """What one process sends: a closed loop of `clients`, or an open one of `rate` requests a second.

    prompt and output: tokens of a request. seed decides prompts and arrivals.
    """

    address: str
    prompt: int
    output: int
    requests: int
    seed: int
    clients: int = 0
    rate: float = 0.0

    async def run(self) -> list[Served]:
        async with AsyncClient(self.address) as client:
            tokens = range(LOWEST_TOKEN, (await client.model_info()).vocab_size)
            draw = random.Random(self.seed)
            prompts = [draw.choices(tokens, k=self.prompt) for _ in range(self.requests)]
            if self.rate:
                return await self._open_loop(client, prompts, draw)
            return await self._closed_loop(client, prompts)

    async def _closed_loop(self, client: AsyncClient, prompts: list[list[int]]) -> list[Served]:
        left, served = iter(prompts), list[Served]()

        async def one() -> None:
            for prompt in left:
                served.append(await self._request(client, prompt))

        await asyncio.gather(*(one() for _ in range(self.clients)))
        return served

    async def _open_loop(self, client: AsyncClient, prompts: list[list[int]], draw: random.Random) -> list[Served]:
        async def one(prompt: list[int], after: float) -> Served:
            await asyncio.sleep(after)
            return await self._request(client, prompt)

        pauses = (draw.expovariate(self.rate) for _ in prompts)
        return await asyncio.gather(*map(one, prompts, itertools.accumulate(pauses)))

    async def _request(self, client: AsyncClient, prompt: list[int]) -> Served:
        called, arrivals = time.perf_counter(), list[float]()
        async for update in client.generate(
            prompt, timeout=REQUEST_SECONDS, max_tokens=self.output, temperature=0, ignore_eos=True
        ):
            arrivals += itertools.repeat(time.perf_counter(), len(update.token_ids))
        return Served(called, arrivals)


class LoadProcesses:
    """They have started when the constructor returns. Used as a context."""

    def __init__(self, count: int) -> None:
        command = [sys.executable, "-m", "tests.benchmarks.load"]
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(count)
        ]
        self._ask([""] * count)

    def run(self, shares: Sequence[Share]) -> list[Served]:
        """All at once; at most one for each process."""
        answers = self._ask([json.dumps(asdict(share)) for share in shares])
        return [Served(**one) for answer in answers for one in json.loads(answer)]

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
        served = asyncio.run(Share(**json.loads(line)).run()) if line.strip() else []
        print(json.dumps([asdict(one) for one in served]), flush=True)


if __name__ == "__main__":
    main()
