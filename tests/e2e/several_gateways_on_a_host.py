"""A client of several gateways, for other hosts. argv: a task, the gateways' addresses with commas between, and the CA.

takes_over: one request begins at the first gateway, and each other one resumes it. Prints the tokens of a call that ran
through, those that came over all calls, and how the calls that lost the request ended.
beside: while a request of the first gateway runs, the second one is sent others. Prints whether one of them was decoded
by another island.
goes_on: prints `begun` when the first tokens are there, then all tokens, the gateway that sent the last, and how often
it placed the request.
ends: prints `begun` when each gateway has answered a first request. Then it sends each one after another until one
fails. Prints for each gateway when they ended well, by the monotonic clock that all hosts of a machine share; whether
they had the tokens of the first one, as far as they came; and how the last one ended.
"""

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import grpc

from tandem.cluster.client import Client
from tandem.cluster.credentials import ClientSecurity
from tandem.cluster.protocol import build_request
from tandem.proto import inference_pb2, inference_pb2_grpc
from tests.support.client_requests import GREEDY

SHORT, LONG = 300, 1500
TRIES = 200
TAKE_OVERS = 4
RECEIVED = 5  # messages until the next call resumes the request


def _prompt(length: int, seed: int) -> list[int]:
    """Makes a prompt without tests.support.oracle, whose imports take longer than many a request."""
    return random.Random(seed).choices(range(3, 199), k=length)


PROMPT = _prompt(50, 77)


def takes_over(addresses: list[str], security: ClientSecurity) -> dict[str, Any]:
    credentials = security.credentials(addresses[0])
    assert credentials is not None
    channels = [grpc.secure_channel(one, credentials) for one in addresses]
    for channel in channels:  # or the request may end while the next call connects
        grpc.channel_ready_future(channel).result(60)
    stubs: list[Any] = [security.authorize(inference_pb2_grpc.InferenceStub(channel)) for channel in channels]

    def call(stub: Any, received: list[int] | None = None) -> Any:
        request = build_request(PROMPT, {**GREEDY, "max_tokens": LONG, "seed": 1}, "mine")
        if received is not None:
            request.resume.CopyFrom(inference_pb2.Resume(token_ids=received))
        return stub.Generate(request, timeout=60)

    whole = [token for message in call(stubs[-1]) for token in message.token_ids]
    tokens: list[int] = []
    ended: list[str] = []
    for _ in range(TAKE_OVERS):
        tokens, ended = _taken_over(stubs, call)
        if "well" not in ended:
            break
    return {"whole": whole, "tokens": tokens, "ended": ended}


def _taken_over(stubs: list[Any], call: Callable[..., Any]) -> tuple[list[int], list[str]]:
    """The tokens of a request that each gateway takes over in turn, and how its calls ended but for the last: "well"
    where one came to its end on a busy machine, before the next gateway had asked."""
    calls, tokens = [call(stubs[0])], []
    for stub in [*stubs[1:], None]:
        tokens += [token for _ in range(RECEIVED) for token in next(calls[-1]).token_ids]
        if stub is not None:
            calls.append(call(stub, tokens))
    tokens += [token for message in calls[-1] for token in message.token_ids]
    ended: list[str] = []
    for old in calls[:-1]:
        try:
            list(old)
            ended.append("well")
        except grpc.RpcError as error:
            ended.append(f"{error.code().name}: {error.details()}")  # type: ignore[attr-defined]
    return tokens, ended


def goes_on(addresses: list[str], security: ClientSecurity) -> dict[str, Any]:
    with Client(addresses, security) as client:
        tokens: list[int] = []
        attempts = 0
        sampling: Any = {**GREEDY, "max_tokens": LONG}
        for update in client.generate(PROMPT, timeout=120, **sampling):
            if not tokens:
                print("begun", flush=True)
            tokens += update.token_ids
            attempts = update.timings.attempts if update.timings else attempts
        return {"tokens": tokens, "address": client.address, "attempts": attempts}


def ends(addresses: list[str], security: ClientSecurity) -> list[dict[str, Any]]:
    stubs: list[Any] = []
    for address in addresses:
        credentials = security.credentials(address)
        assert credentials is not None
        channel = grpc.secure_channel(address, credentials)
        stubs.append(security.authorize(inference_pb2_grpc.InferenceStub(channel)))

    def ask(stub: Any, name: str) -> Iterator[int]:
        request = build_request(PROMPT, {**GREEDY, "max_tokens": SHORT}, name)
        return (token for message in stub.Generate(request, timeout=60) for token in message.token_ids)

    first = [list(ask(stub, f"first-{number}")) for number, stub in enumerate(stubs)]
    whole = first[0]
    print("begun", flush=True)

    def until_one_fails(number: int) -> dict[str, Any]:
        times: list[float] = []
        same, tokens = True, list[int]()
        try:
            while same:
                tokens.clear()
                tokens += ask(stubs[number], f"{number}-{len(times)}")
                same = tokens == whole
                times.append(time.monotonic())
        except grpc.RpcError as error:
            ended = f"{error.code().name}: {error.details()}"  # type: ignore[attr-defined]
            return {"times": times, "same": tokens == whole[: len(tokens)], "ended": ended}
        return {"times": times, "same": False, "ended": ""}

    with ThreadPoolExecutor(len(stubs)) as pool:
        return list(pool.map(until_one_fails, range(len(stubs))))


def beside(addresses: list[str], security: ClientSecurity) -> bool:
    def decoded(client: Client) -> dict[str, int]:
        islands = client.cluster_info().islands
        return {one.name: sum(worker.counters.decoded_tokens for worker in one.workers) for one in islands}

    sampling: Any = {**GREEDY, "max_tokens": 2}
    over = Event()
    runs = [0]  # odd while a request of the first gateway runs

    def keep_one_running(client: Client) -> None:
        while not over.is_set():
            for number, _ in enumerate(client.generate(PROMPT, timeout=60, **(sampling | {"max_tokens": LONG}))):
                runs[0] += number == 0
            runs[0] += 1

    with (
        Client(addresses[0], security) as first,
        Client(addresses[1], security) as second,
        ThreadPoolExecutor(1) as pool,
    ):
        running = pool.submit(keep_one_running, first)
        try:
            for number in range(TRIES):
                run, before = runs[0], decoded(second)
                list(second.generate(_prompt(20, 500 + number), timeout=60, **sampling))
                after = decoded(second)
                one_ran = run % 2 == 1 and runs[0] == run  # and no other: what two islands decoded was of two requests
                if one_ran and sum(after[name] > before[name] for name in after) > 1:
                    return True
        finally:
            over.set()
            running.result()
    return False


def main(task: str, addresses: str, ca: str) -> None:
    tasks = {"takes_over": takes_over, "beside": beside, "goes_on": goes_on, "ends": ends}
    print(json.dumps(tasks[task](addresses.split(","), ClientSecurity(os.environ["TOKEN"], ca))))


if __name__ == "__main__":
    main(*sys.argv[1:])
