"""Clients on another host, which ask again and again until standard input ends, and compare every token.

argv: the gateway's address, its CA, a file of [cases, number of clients, seed]; a case is [prompt, sampling, tokens].
Writes a JSON line for each stream: its outcome, by how many attempts, and its longest pause in seconds.
"""

import asyncio
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tandem.cluster.client import AsyncClient
from tandem.cluster.credentials import ClientSecurity
from tandem.cluster.errors import CallError

CALL_SECONDS = 600.0
END_SECONDS = 660.0
AGAIN_SECONDS = 0.3


class HostClients:
    """These clients as the test sees them: a process that `command` starts on its host, and its reports."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], cases: list[Any], folder: Path, seed: int = 0
    ) -> None:
        asked = folder / "cases.json"
        asked.write_text(json.dumps([cases, 8, seed]))
        self._errors = folder / "clients.log"
        with self._errors.open("w") as log:
            self._process = subprocess.Popen(
                [*command, str(asked)],
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.outcomes: Counter[str] = Counter()
        self.attempts: Counter[int] = Counter()  # of finished streams
        self.longest_pause = 0.0
        self._thread = threading.Thread(target=self._read, name="clients", daemon=True)
        self._thread.start()

    @property
    def finished(self) -> int:
        return self.outcomes["finished"]

    @property
    def streams(self) -> int:
        return self.outcomes.total()

    @property
    def wrong(self) -> list[str]:
        return [outcome for outcome in self.outcomes if outcome.startswith("wrong")]

    def wait(self, seconds: float) -> None:
        """Waits for the end. TimeoutExpired when the clients still ask after so long."""
        self._process.wait(seconds)

    def stop(self) -> None:
        """Returns when all streams have ended."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        code = self._process.wait(END_SECONDS)
        self._thread.join()
        assert code == 0, self._errors.read_text()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._thread.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            said = json.loads(line)
            if said["outcome"] == "finished":
                self.attempts[said["attempts"]] += 1
            self.longest_pause = max(self.longest_pause, said["pause"])
            self.outcomes[said["outcome"]] += 1


async def _ask(client: AsyncClient, cases: list[Any], rng: random.Random, over: asyncio.Event) -> None:
    while not over.is_set():
        prompt, sampling, expected = rng.choice(cases)
        tokens: list[int] = []
        attempts, pause, last = 0, 0.0, time.monotonic()
        try:
            async for update in client.generate(prompt, timeout=CALL_SECONDS, **sampling):
                now = time.monotonic()
                pause, last = max(pause, now - last), now
                tokens += update.token_ids
                attempts = update.timings.attempts if update.timings else attempts
            outcome = "finished" if tokens == expected else f"wrong: {tokens} ended before {expected}"
        except CallError as error:
            said = re.sub(r"'[^']*'|epoch \d+", "…", str(error))  # so that those of many requests are counted together
            outcome = f"{'ended' if tokens else 'refused'}: {type(error).__name__}: {said}"
        if tokens != expected[: len(tokens)]:
            outcome = f"wrong: {tokens} is not the beginning of {expected}"
        print(json.dumps({"outcome": outcome, "attempts": attempts, "pause": round(pause, 2)}), flush=True)
        if outcome != "finished":
            await asyncio.sleep(AGAIN_SECONDS)


async def main(address: str, ca: str, path: str) -> None:
    cases, number, seed = json.loads(Path(path).read_text())
    over = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), over.set)
    async with AsyncClient(address, ClientSecurity(os.environ["TOKEN"], ca), resume_seconds=CALL_SECONDS) as client:
        await asyncio.gather(*(_ask(client, cases, random.Random(f"{seed} {one}"), over) for one in range(number)))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
