"""Somebody who attacks the gateway's ports while the storm goes on."""

import asyncio
import itertools
import multiprocessing
from collections import Counter
from contextlib import suppress
from multiprocessing.connection import Connection

from tests.benchmarks.attack_kinds import ATTACKS, Target

# Large messages and bodies, bursts, half-open connections, bad HTTP. Each is bounded, and so is how long it goes on.
ROTATION = (
    "call_bursts",
    "empty_chat_messages",
    "bad_http",
    "json_token_ids",
    "half_open_connections",
    "unknown_fields",
    "json_stop_strings",
)
EACH_SECONDS = 2.0
END_SECONDS = 60.0


class Attacker:
    """Attacks from a process of its own inside the block."""

    def __init__(self, grpc: str, http: str) -> None:
        """Addresses of a gateway, HOST:PORT."""
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_attack, args=(theirs, Target(grpc, http)), name="attacker", daemon=True)
        self.answers: Counter[str] = Counter()

    def __enter__(self) -> "Attacker":
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ours.send(None)
        if self._ours.poll(END_SECONDS):
            self.answers = self._ours.recv()
        self._process.kill()
        self._process.join()


def _attack(pipe: Connection, target: Target) -> None:
    answers: Counter[str] = Counter()

    async def run() -> None:
        for name in itertools.cycle(ROTATION):
            if pipe.poll():
                return
            answers[name] += 1
            send, heard = ATTACKS[name](), Counter[str]()
            with suppress(TimeoutError, OSError):  # the gateway may be away
                async with asyncio.timeout(EACH_SECONDS):
                    while not pipe.poll():
                        await send(target, heard)
            answers.update({f"{name}, {said[:60]}": count for said, count in heard.items()})

    asyncio.run(run())
    pipe.send(answers)
