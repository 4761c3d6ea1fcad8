"""The process that attacks."""

import asyncio
import os
from multiprocessing.connection import Connection

from tests.benchmarks.strangers.attacks import Answers, Attack, Target
from tests.benchmarks.strangers.grpc_attacks import GRPC_ATTACKS
from tests.benchmarks.strangers.http_attacks import HTTP_ATTACKS

ATTACKS: dict[str, Attack] = {**HTTP_ATTACKS, **GRPC_ATTACKS}
assert len(ATTACKS) == len(HTTP_ATTACKS) + len(GRPC_ATTACKS), "each has a name of its own"
NICE = 10


def attack(pipe: Connection, target: Target) -> None:
    """Attacks in a process of its own: makes the attack that it is given, with so many connections, until it is told to
    end."""
    os.nice(NICE)
    while (given := pipe.recv()) is not None:
        name, connections = given
        answers = Answers()
        asyncio.run(_attacked(ATTACKS[name], connections, target, answers, pipe))
        pipe.send(answers)


async def _attacked(one: Attack, connections: int, target: Target, answers: Answers, pipe: Connection) -> None:
    attacks = [asyncio.ensure_future(_again(one, target, answers)) for _ in range(connections)]
    over = asyncio.Event()
    asyncio.get_running_loop().add_reader(pipe.fileno(), over.set)
    await over.wait()
    pipe.recv()
    for each in attacks:
        each.cancel()
    await asyncio.wait(attacks)


async def _again(one: Attack, target: Target, answers: Answers) -> None:
    while True:
        try:
            await one(target, answers)
        except Exception as error:
            answers[type(error).__name__] += 1
        await asyncio.sleep(0)
