"""A storm over a cluster that `tandem up` runs: its processes, and its Ray, are killed and stopped while clients ask.

When the launcher or its raylet is lost, nothing of the cluster may be left; it is then launched again on the same
ports. Clients that resume go on there. Without Ray's GCS the cluster serves on, until it needs another process host.
"""

import asyncio
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx

from tandem.cluster.client import AsyncClient
from tandem.cluster.errors import CallError, Unavailable
from tandem.cluster.protocol import CLUSTER_ENDS
from tests.chaos.http_stream import HttpStream
from tests.chaos.launched import START_SECONDS, Launched
from tests.chaos.storm import Blow
from tests.support.free_ports import free_ports
from tests.support.oracle import greedy, load_oracle, random_prompt

VOCABULARY = 512
OUTPUT_TOKENS = 60
RESUME_SECONDS = 600.0  # a launch on a busy machine takes minutes
QUIET_SECONDS = 3.0  # longest wait for messages to clients before the next blow
WHOLE = ("raylet", "launcher")  # with one of them the cluster is lost
TARGETS = {"prefill": 6, "decode": 6, "gateway": 6, "island": 3, "process host": 2}  # and how often
TARGETS |= {"fork server": 4, "spare": 2}
SURVIVED = dict(TARGETS)  # by the cluster, as it is
TARGETS |= dict.fromkeys(("GCS", *WHOLE), 1)
PROBE_SECONDS = 0.5  # between probes, and the longest wait for an answer
START_PARTS = ("runtime file", "GCS", "raylet", "process host", "decode", "gateway")  # in the order of a start
SETTINGS = (
    "island.threads_per_worker=1",
    "island.verify_kv=true",
    "cache.page_size=8",
    "cache.num_pages=128",
    "scheduler.max_batch_tokens=32",
    "gateway.processes=2",
    "gateway.max_attempts=100",
    "recovery.max_restarts=100000",
    "recovery.drain_seconds=1",
    "recovery.unresponsive_seconds=5",
    "ray.num_cpus=2",
)


@dataclass(frozen=True)
class Case:
    prompt: list[int]
    sampling: dict[str, Any]
    tokens: list[int]


@dataclass
class Outcome:
    """The counts of clients' streams and of blows to the cluster. recovered: streams that broke, and came to their
    end."""

    streams: int = 0
    finished: int = 0
    recovered: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    blows: Counter[str] = field(default_factory=Counter)
    launches: int = 0
    interrupted: Counter[str] = field(default_factory=Counter)  # starts, by SIGTERM, once they had come so far
    seconds: float = 0.0
    probes: int = 0
    answered: int = 0  # of the probes, by a gateway, within PROBE_SECONDS


def plan_ray_blows(seed: int, number: int, kinds: Mapping[str, int] = MappingProxyType(TARGETS)) -> list[Blow]:
    """Plans the blows. kinds: weights of targets."""
    rng = random.Random(seed)
    targets, weights = list(kinds), list(kinds.values())
    return [
        Blow(
            messages=rng.randrange(60),
            target=rng.choices(targets, weights)[0],
            how=rng.choices(("kill", "stop"), (8, 3))[0],
            seconds=rng.uniform(0.05, 1.0),
        )
        for _ in range(number)
    ]


class RayStorm:
    """One island, two gateway processes; clients that resume, one that does not, and one over HTTP."""

    def __init__(
        self, model: Path, seed: int, num_clients: int = 3, every: float = 0.0, transport: str | None = None
    ) -> None:
        """every: seconds from blow to blow; 0 waits for some messages to clients instead. transport: None is the
        configuration's."""
        self._every = every
        self._settings = SETTINGS if transport is None else (*SETTINGS, f"island.transport={transport}")
        self._model = model
        self._random = random.Random(seed)
        self._seed = seed
        self._num_clients = num_clients
        self._ports = free_ports(2)
        self._received = 0
        self._over = threading.Event()
        self._failed: BaseException | None = None
        self._without_gcs = False
        self.outcome = Outcome()
        self._cluster = self._launch()

    def run(self, blows_planned: Sequence[Blow]) -> Outcome:
        """Runs until all blows have fallen; then the cluster is stopped, and nothing of it is left."""
        began = time.monotonic()
        blows = threading.Thread(target=self._strike, args=(blows_planned,), name="blows")
        probes = threading.Thread(target=self._probe, name="probes")
        try:
            cases = asyncio.run(self._cases())
            blows.start()
            probes.start()
            asyncio.run(self._clients(cases))
        except AssertionError as error:
            raise self._failed or error from None
        else:
            if self._failed is not None:
                raise self._failed
        finally:
            self._over.set()
            for thread in (blows, probes):
                if thread.ident is not None:
                    thread.join()
            stopped = self._cluster.stop()
        assert stopped == 0
        self._cluster.check_gone()
        self.outcome.seconds = round(time.monotonic() - began, 1)
        return self.outcome

    @property
    def _address(self) -> str:
        return f"127.0.0.1:{self._ports[0]}"

    def _launch(self) -> Launched:
        self.outcome.launches += 1
        if self.outcome.launches > 1 and self._random.random() < 0.5:
            part = self._random.choice(START_PARTS)
            self._begin().interrupt(part, self._random.random())
            self.outcome.interrupted[part] += 1
        return self._begin().ready()

    def _begin(self) -> Launched:
        return Launched(self._model, f"ray-storm-{os.getpid()}", self._ports, self._settings)

    async def _cases(self) -> list[Case]:
        """Makes the cases, with undisturbed tokens; greedy ones are those of transformers."""
        oracle, cases = load_oracle(self._model), []
        async with AsyncClient(self._address) as client:
            for number in range(8):
                prompt = random_prompt(self._random.randrange(1, 90), number, VOCABULARY)
                sampling: dict[str, Any] = {"max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "temperature": 0}
                if number % 2:
                    sampling |= {"temperature": 1.0, "seed": number, "top_p": 0.9}
                stream = client.generate(prompt, timeout=60, **sampling)
                tokens = [token async for update in stream for token in update.token_ids]
                assert number % 2 or tokens == greedy(oracle, prompt, OUTPUT_TOKENS)
                cases.append(Case(prompt, sampling, tokens))
        return cases

    # Clients

    async def _clients(self, cases: Sequence[Case]) -> None:
        async with AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(AsyncClient(self._address, resume_seconds=seconds))
                for seconds in [RESUME_SECONDS] * self._num_clients + [0.0]
            ]
            url = f"http://127.0.0.1:{self._ports[1]}"
            http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=120, trust_env=False))
            await asyncio.gather(*(self._ask(one, cases, number) for number, one in enumerate(clients)),
                                 self._ask_http(http, cases))  # fmt: skip

    async def _ask(self, client: AsyncClient, cases: Sequence[Case], number: int) -> None:
        rng, resumes = random.Random(f"{self._seed} {number}"), number < self._num_clients
        while not self._over.is_set():
            case, tokens = rng.choice(cases), list[int]()
            launches = self.outcome.launches
            attempts = 0
            try:
                async for update in client.generate(case.prompt, timeout=2 * RESUME_SECONDS, **case.sampling):
                    self._received += 1
                    tokens += update.token_ids
                    attempts = update.timings.attempts if update.timings else attempts
            except CallError as error:
                self._end(error, bool(tokens))
                if resumes and isinstance(error, Unavailable):
                    raise AssertionError(f"after {RESUME_SECONDS} s") from error
                await asyncio.sleep(0.3)
            else:
                assert tokens == case.tokens, f"{tokens} ended before {case.tokens}"
                self.outcome.streams += 1
                self.outcome.finished += 1
                self.outcome.recovered += attempts > 1 or self.outcome.launches > launches
            assert tokens == case.tokens[: len(tokens)], f"{tokens} is not the beginning of {case.tokens}"

    def _end(self, error: CallError, begun: bool) -> None:
        words = ", in the cluster's words" if CLUSTER_ENDS in str(error) else ""
        self.outcome.streams += begun
        (self.outcome.ends if begun else self.outcome.refused)[f"{type(error).__name__}{words}"] += 1

    async def _ask_http(self, client: httpx.AsyncClient, cases: Sequence[Case]) -> None:
        rng = random.Random(f"{self._seed} http")
        while not self._over.is_set():
            case, stream = rng.choice(cases), HttpStream()
            await stream.receive(client, {"prompt": case.prompt, "return_token_ids": True, **case.sampling}, None)
            assert stream.tokens == case.tokens[: len(stream.tokens)]
            begun = bool(stream.tokens)
            self.outcome.streams += begun
            if stream.ended:
                assert stream.tokens == case.tokens
                self.outcome.finished += 1
                continue
            words = ", in the cluster's words" if CLUSTER_ENDS in stream.error else ""
            assert stream.error or stream.broken, f"{stream.tokens} ended without a word"
            kind = f"HTTP error{words}" if stream.error else "HTTP connection broken"
            (self.outcome.ends if begun else self.outcome.refused)[kind] += 1
            await asyncio.sleep(0.3)

    # Blows

    def _strike(self, blows: Sequence[Blow]) -> None:
        try:
            for number, blow in enumerate(blows):
                if number and number % 10 == 0:
                    print(json.dumps({"seed": self._seed, **vars(self.outcome)}), file=sys.stderr, flush=True)
                until, deadline = self._received + blow.messages, time.monotonic() + (self._every or QUIET_SECONDS)
                while (self._every or self._received < until) and time.monotonic() < deadline:
                    time.sleep(0.005)
                self._hit(blow)
        except BaseException as error:
            self._failed = error
            print(f"the blows have ended: {error!r}", file=sys.stderr, flush=True)  # clients may wait for minutes
        finally:
            self._over.set()

    def _probe(self) -> None:
        while not self._over.wait(PROBE_SECONDS):
            self.outcome.probes += 1
            with suppress(httpx.HTTPError):
                answer = httpx.get(f"http://127.0.0.1:{self._ports[1]}/health", timeout=PROBE_SECONDS, trust_env=False)
                self.outcome.answered += answer.status_code == httpx.codes.OK

    def _hit(self, blow: Blow) -> None:
        target = blow.target
        if self._without_gcs and target == "GCS":
            target = "process host"
        pids = self._wait_for(target)
        if target not in ("island", "launcher"):
            pids = [self._random.choice(pids)]
        self.outcome.blows[f"{blow.how} {target}"] += 1
        _signal(pids, signal.SIGKILL if blow.how == "kill" else signal.SIGSTOP)
        if blow.how == "stop":
            time.sleep(blow.seconds)
            _signal(pids, signal.SIGCONT)
        elif target == "GCS":
            self._without_gcs = True
            self._wait_for_words("has lost its GCS: what runs serves on")
        elif target in WHOLE or (self._without_gcs and target == "process host"):
            self._end_of(target)

    def _end_of(self, target: str) -> None:
        """Checks the end of the whole cluster. The next one takes its place."""
        code = self._cluster.wait()
        assert code == (-signal.SIGKILL if target == "launcher" else 1), f"exit code {code} after a loss of {target}"
        said = {"raylet": "its raylet has ended", "process host": "has lost its GCS", "launcher": ""}[target]
        assert said in self._cluster.log.read_text()
        self._cluster.check_gone()
        self._cluster.log.unlink()
        self._without_gcs = False
        self._cluster = self._launch()

    def _wait_for_words(self, words: str) -> None:
        deadline = time.monotonic() + 120
        while words not in self._cluster.log.read_text():
            assert self._cluster.process.poll() is None, self._cluster.log.read_text()[-2000:]
            assert time.monotonic() < deadline, f"nobody said {words!r}: {self._cluster.log.read_text()[-2000:]}"
            time.sleep(0.05)

    def _wait_for(self, target: str) -> list[int]:
        deadline = time.monotonic() + START_SECONDS
        while not (pids := self._cluster.pids(target)):
            assert time.monotonic() < deadline, (
                f"no {target} was started again: {self._cluster.log.read_text()[-2000:]}"
            )
            time.sleep(0.05)
        return pids


def _signal(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # an earlier blow has ended its island
            os.kill(pid, number)
