"""A client that goes away, wherever its request is, leaves nothing behind on either worker. Through the gRPC server."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from tandem.cluster.client import Client
from tandem.cluster.errors import DeadlineExceeded
from tandem.proto import inference_pb2, inference_pb2_grpc
from tandem.workers.worker import Worker
from tests.support.checkpoints import save_checkpoint
from tests.support.client_requests import GREEDY, complete, tokens_of
from tests.support.island import FakeIsland, Island, running_island
from tests.support.oracle import greedy, load_oracle, random_prompt
from tests.support.steady_steps import STEADY, steady_here
from tests.support.waiting import until

PREFILL, DECODE = 0, 1
PAGES = 24
PROMPT, LONG = random_prompt(40, 0), random_prompt(40, 1)
STEP_SECONDS = 30.0  # bounds what a test waits for; nothing is measured


@dataclass(frozen=True)
class Scene:
    """One island over the fake transport: 24 pages of 8, chunks of 16, and room for one LONG request at a time."""

    island: Island
    transports: FakeIsland
    stub: inference_pb2_grpc.InferenceStub

    def call(self, prompt: list[int] = PROMPT, max_tokens: int = 40, timeout: float = 60.0) -> grpc.Call:
        sampling = inference_pb2.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=prompt), sampling=sampling)
        return self.stub.Generate(request, timeout=timeout)

    def cluster(self) -> inference_pb2.ClusterInfo:
        return self.stub.GetClusterInfo(inference_pb2.GetClusterInfoRequest(), timeout=10)

    def worker(self, pe: int) -> Worker:
        return self.island.workers[pe]

    @property
    def active(self) -> int:
        """Counts the requests at the gateway. It needs no worker's answer."""
        return self.island.gateway._requests.running

    @property
    def queued(self) -> int:
        return self.island.gateway._router.queued

    def free_pages(self, pe: int) -> int:
        worker = self.worker(pe)
        return worker.on_step_thread(lambda: worker.cache.pages.free)

    @contextmanager
    def stopped(self, pe: int) -> Iterator[None]:
        """Stops the worker's step thread inside the block; calls to it wait."""
        entered, resume = threading.Event(), threading.Event()
        thread = self.worker(pe)._step_thread
        assert thread is not None
        thread.call(lambda: (entered.set(), resume.wait(STEP_SECONDS)))
        assert entered.wait(STEP_SECONDS)
        try:
            yield
        finally:
            resume.set()


def status_of(call: grpc.Call) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError):
        list(call)  # type: ignore[call-overload]
    return call.code()  # type: ignore[return-value]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def scene(checkpoint: Path) -> Iterator[Scene]:
    transports = FakeIsland()
    settings = {"cache.num_pages": PAGES, "cache.prefix_sharing": False, "scheduler.max_batch_tokens": 16}
    with (
        steady_here(STEADY),  # so that requests last until their clients go
        running_island(checkpoint, settings, transports) as island,
        grpc.insecure_channel(island.address) as channel,
    ):
        yield Scene(island, transports, inference_pb2_grpc.InferenceStub(channel))


# Where the request is when its client goes.


def before_routing(scene: Scene) -> None:
    call = scene.call()
    call.cancel()


def in_the_queue(scene: Scene) -> None:
    holder = scene.call(LONG, max_tokens=150)
    next(holder)  # type: ignore[call-overload]
    with scene.stopped(DECODE):  # so that the holder keeps its pages, and its successor waits
        call = scene.call(LONG, max_tokens=150)
        call.cancel()
    waiting = scene.call(LONG, max_tokens=150)
    until(lambda: scene.queued == 1)
    waiting.cancel()
    until(lambda: scene.queued == 0)
    holder.cancel()


def while_its_pages_are_set_aside(scene: Scene) -> None:
    with scene.stopped(DECODE):
        call = scene.call()
        until(lambda: scene.active == 1)
        call.cancel()
        until(lambda: scene.active == 0)


def between_reservation_and_prefill(scene: Scene) -> None:
    with scene.stopped(PREFILL):
        call = scene.call()
        until(lambda: scene.free_pages(DECODE) < PAGES)
        call.cancel()
        until(lambda: scene.active == 0)


def between_two_chunks(scene: Scene) -> None:
    pause = scene.transports.fabric.pause_next("write_slots", DECODE, skip=1)
    call = scene.call()
    assert pause.entered.wait(STEP_SECONDS)
    call.cancel()
    until(lambda: scene.active == 0)
    pause.resume()


def after_landing_before_the_first_step(scene: Scene) -> None:
    pause = scene.transports.fabric.pause_next("post", DECODE)
    call = scene.call()
    assert pause.entered.wait(STEP_SECONDS)
    with scene.stopped(DECODE):
        pause.resume()
        next(call)  # type: ignore[call-overload]  # the prefill worker's token: all has landed
        call.cancel()


def while_decoding(scene: Scene) -> None:
    call = scene.call(max_tokens=150)
    for _ in range(3):
        next(call)  # type: ignore[call-overload]
    call.cancel()


def at_its_deadline_in_the_queue(scene: Scene) -> None:
    holder = scene.call(LONG, max_tokens=150)
    next(holder)  # type: ignore[call-overload]
    waiting = scene.call(LONG, max_tokens=150, timeout=0.5)
    until(lambda: scene.queued == 1)
    with scene.stopped(DECODE):  # so that the holder keeps its pages
        assert status_of(waiting) == grpc.StatusCode.DEADLINE_EXCEEDED
    holder.cancel()


def at_its_deadline_in_mid_push(scene: Scene) -> None:
    pause = scene.transports.fabric.pause_next("write_slots", DECODE, skip=1)
    call = scene.call(timeout=0.5)
    assert pause.entered.wait(STEP_SECONDS)
    assert status_of(call) == grpc.StatusCode.DEADLINE_EXCEEDED
    pause.resume()


PLACES = [
    before_routing,
    in_the_queue,
    while_its_pages_are_set_aside,
    between_reservation_and_prefill,
    between_two_chunks,
    after_landing_before_the_first_step,
    while_decoding,
    at_its_deadline_in_the_queue,
    at_its_deadline_in_mid_push,
]


@pytest.mark.parametrize("leave", PLACES, ids=lambda place: place.__name__)
def test_a_client_that_goes_away_leaves_nothing(scene: Scene, checkpoint: Path, leave: Callable[[Scene], None]) -> None:
    leave(scene)

    def idle() -> bool:
        info = scene.cluster()
        return not (info.active or info.queued) and all(
            worker.free_pages == PAGES and not worker.draining_pages + worker.running + worker.waiting
            for worker in info.islands[0].workers
        )

    until(idle)
    links = [link for island in scene.island.gateway._islands._current.values() for link in island.links]
    until(lambda: [link.load for link in links] == [0, 0])
    assert tokens_of(complete(scene.island.address, PROMPT, max_tokens=4, **GREEDY)) == greedy(
        load_oracle(checkpoint), PROMPT, 4
    )


def test_the_gateways_own_limit_of_a_requests_life(checkpoint: Path) -> None:
    transports = FakeIsland()
    settings = {"cache.num_pages": PAGES, "gateway.request_seconds": 0.2, "cache.prefix_sharing": False}
    with running_island(checkpoint, settings, transports) as island, Client(island.address) as client:
        pause = transports.fabric.pause_next("post", DECODE)
        with pytest.raises(DeadlineExceeded, match=r"the request ran for 0\.2 s, which is gateway\.request_seconds$"):
            list(client.generate(PROMPT, max_tokens=4, **GREEDY))
        pause.resume()
        until(lambda: all(worker.free_pages == PAGES for worker in client.cluster_info().islands[0].workers))
