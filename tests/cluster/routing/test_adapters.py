"""The router places a request only on workers that hold its adapter, and knows prefixes of each adapter apart."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import pytest

from tandem.cache.plan.prefix_chain import KEY_BYTES, adapter_salt, digest_chain
from tandem.cluster.adapters.names import ServedNames
from tandem.cluster.adapters.values import Adapter, AdapterSet
from tandem.cluster.errors import AdapterRefused, DeadlineExceeded, InvalidRequest
from tandem.cluster.routing.adapter_loads import STALE_SECONDS, AdapterLoads
from tandem.cluster.routing.admission import AdmissionQueue
from tandem.cluster.routing.cost_model import adaptive
from tandem.cluster.routing.islands import COPIED_TOKENS, Islands
from tandem.cluster.routing.membership import IslandState
from tandem.cluster.routing.policy import POLICIES, Policy
from tandem.cluster.routing.router import Placement, Router
from tandem.cluster.routing.worker_link import WorkerAddress, WorkerLink
from tandem.proto import worker_pb2
from tandem.workers.config import Role
from tandem.workers.wire.prompt_spec import PromptSpec
from tests.cluster.fake_worker import FakeWorker

RED, BLUE = b"r" * 16, b"b" * 16
PAGE = 16
TOKENS = np.arange(PAGE * 4)
POLICY = pytest.mark.parametrize("policy", [*POLICIES.values(), adaptive(0.25), adaptive(0.25, colocated=True)])


def named(**digests: bytes) -> AdapterSet:
    by_name = {name: Adapter(name, f"/{name}", digest) for name, digest in digests.items()}
    return AdapterSet(next(versions), MappingProxyType(by_name))


versions = itertools.count(1)


@dataclass
class Scene:
    """Two prefill and two decode workers of one island."""

    islands: Islands
    router: Router
    names: ServedNames
    workers: list[FakeWorker]
    now: float = 100.0

    @property
    def links(self) -> list[WorkerLink]:
        return list(self.islands.links().values())

    @property
    def loads(self) -> AdapterLoads:
        return AdapterLoads(self.islands, self.names, lambda: self.now)

    def hold(self, *digests: bytes, resident: bytes = b"", pes: tuple[int, ...] = (0, 1, 2, 3)) -> None:
        for pe in pes:
            self.workers[pe].held |= set(digests)
            report = worker_pb2.WorkerReport(adapters=b"".join(digests), resident_adapters=resident)
            self.links[pe].report = report

    async def place(self, adapter: bytes) -> Placement:
        prompt = PromptSpec(TOKENS, whole=True, adapter=adapter)  # no hint goes ahead
        return await self.router.place("r", prompt, 4, "client")


def with_scene(body: Callable[[Scene], Awaitable[None]], policy: Policy = POLICIES["prefix_aware"]) -> None:
    async def run() -> None:
        workers = [FakeWorker(lambda _: 7, adapters={"/red": RED, "/blue": BLUE}) for _ in range(4)]
        for worker in workers:
            await worker.start()
        roles = (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)
        addresses = tuple(WorkerAddress(roles[pe], pe, one.address, "") for pe, one in enumerate(workers))
        islands, names = Islands(1 << 20, policy, PAGE), ServedNames(["model"])
        queue = AdmissionQueue(8, 1 << 16)
        router = Router(islands, queue, id_prefix="g/", queue_seconds=1.0, check_adapter=names.check)
        try:
            await islands.update(IslandState("i", 1, restarts=0, workers=addresses, version=1))
            await body(Scene(islands, router, names, workers))
        finally:
            await router.close()
            await islands.close()
            for worker in workers:
                await worker.stop()

    asyncio.run(asyncio.wait_for(run(), 60))


@POLICY
def test_both_workers_hold_the_adapter(policy: Policy) -> None:
    async def body(scene: Scene) -> None:
        scene.names.update(named(red=RED))
        scene.hold(RED, pes=(1, 3))
        placement = await scene.place(RED)
        assert {placement.prefill.pe, placement.decode.pe} <= {1, 3}

    with_scene(body, policy)


@POLICY
def test_a_worker_that_has_it_on_its_device_is_preferred_up_to_a_price(policy: Policy) -> None:
    async def body(scene: Scene) -> None:
        scene.names.update(named(red=RED))
        scene.hold(RED)
        scene.hold(RED, resident=RED, pes=(1, 3))
        placement = await scene.place(RED)
        assert {placement.prefill.pe, placement.decode.pe} <= {1, 3}
        if policy in POLICIES.values():
            for link in (scene.links[1], scene.links[3]):
                link.load = 8 * COPIED_TOKENS
                link.expect_prompt("before", 8 * COPIED_TOKENS)
            placement = await scene.place(RED)
            assert (placement.prefill.pe, placement.decode.pe) == (0, 2)

    with_scene(body, policy)


def test_a_worker_that_does_not_hold_it_is_not_asked_again() -> None:
    async def body(scene: Scene) -> None:
        scene.names.update(named(red=RED))
        scene.hold(RED)
        scene.workers[2].held.clear()  # its report comes later
        for _ in range(4):
            assert (await scene.place(RED)).decode.pe == 3
        assert RED not in scene.links[2].adapters

    with_scene(body)


def test_nobody_that_holds_it_is_a_refusal_that_names_it() -> None:
    async def body(scene: Scene) -> None:
        scene.names.update(named(red=RED))
        with pytest.raises(DeadlineExceeded, match=f"no worker held the adapter {RED.hex()}"):
            await scene.place(RED)

    with_scene(body)


def test_a_request_that_waits_ends_when_its_adapter_is_removed() -> None:
    async def body(scene: Scene) -> None:
        scene.names.update(named(red=RED))
        placing = asyncio.ensure_future(scene.place(RED))
        await asyncio.sleep(0.2)
        assert not placing.done()
        scene.names.update(named(red=BLUE))
        scene.router.look_again()
        with pytest.raises(AdapterRefused, match="its name was loaded with other weights"):
            await placing

    with_scene(body)


def test_others_pass_a_request_that_waits_for_a_slot() -> None:
    async def body(scene: Scene) -> None:
        scene.names.update(named(red=RED, blue=BLUE))
        scene.hold(RED, BLUE)
        decodes = scene.workers[2:]
        for worker in decodes:
            worker.slotless = {RED}
        waiting: list[asyncio.Future[Placement]] = []
        for number in range(3):
            waiting.append(asyncio.ensure_future(scene.place(RED)))
            while scene.router.queued <= number:
                await asyncio.sleep(0.001)
        for adapter in (b"", BLUE, b"", BLUE):
            placement = await asyncio.wait_for(scene.place(adapter), 0.5)
            await scene.router.give_back(placement, complete=True)
        assert not any(one.done() for one in waiting)
        assert sum(len(worker.refused) for worker in decodes) < 30  # they ask for a slot, but not all the time
        for worker in decodes:
            worker.slotless.clear()
        asked = [int((await one).request_id[2:-2]) for one in waiting]
        assert asked == sorted(asked)
        assert scene.router.queued == 0

    with_scene(body)


def test_others_pass_a_request_whose_adapter_no_worker_holds() -> None:
    """Its workers have come anew and read it, or find its folder changed."""

    async def body(scene: Scene) -> None:
        scene.names.update(named(red=RED, blue=BLUE))
        scene.hold(BLUE)
        red = asyncio.ensure_future(scene.place(RED))
        while not scene.router.queued:
            await asyncio.sleep(0.001)
        for adapter in (b"", BLUE):
            placement = await asyncio.wait_for(scene.place(adapter), 0.5)
            await scene.router.give_back(placement, complete=True)
        assert not red.done()
        scene.hold(RED, BLUE)
        await red

    with_scene(body)


def test_nobody_passes_one_that_waits_for_pages_of_another_worker() -> None:
    """A slot is lacking at one worker, pages at the other: what becomes free there is for the first that waits."""

    async def body(scene: Scene) -> None:
        scene.names.update(named(red=RED, blue=BLUE))
        scene.hold(RED, BLUE)
        scene.workers[2].slotless = {RED}
        scene.workers[3].fails["PrepareReceive"] = ["RESOURCE_EXHAUSTED"] * 3
        red = asyncio.ensure_future(scene.place(RED))
        while not scene.router.queued:
            await asyncio.sleep(0.001)
        blue = asyncio.ensure_future(scene.place(BLUE))
        assert {red, blue} == (await asyncio.wait({red, blue}))[0]
        assert int(red.result().request_id[2:-2]) < int(blue.result().request_id[2:-2])

    with_scene(body)


def test_a_request_that_found_no_slot_in_time_hears_so() -> None:
    async def body(scene: Scene) -> None:
        scene.names.update(named(red=RED))
        scene.hold(RED)
        for worker in scene.workers:
            worker.slotless = {RED}
        with pytest.raises(DeadlineExceeded, match=rf"no decode worker had a slot for the adapter {RED.hex()}"):
            await scene.place(RED)

    with_scene(body)


def test_a_workers_prefixes_count_for_their_adapter_alone() -> None:
    async def body(scene: Scene) -> None:
        scene.names.update(named(red=RED, blue=BLUE))
        scene.hold(RED, BLUE)
        keys = [one[:KEY_BYTES] for one in digest_chain(TOKENS, PAGE, 3, adapter_salt(RED, b""))]
        report = worker_pb2.WorkerReport(whole=True, added=b"".join(keys), adapters=RED + BLUE)
        scene.links[1]._take_report(report)
        matched = []
        for adapter in (RED, BLUE, b""):
            placement = await scene.router.place("r", PromptSpec(TOKENS, adapter=adapter), 4, "client")
            matched.append(len(TOKENS) - placement.prompt_tokens)
            await scene.router.give_back(placement, complete=False)
        assert matched == [3 * PAGE, 0, 0]

    with_scene(body)


def test_all_workers_load_it_or_none_keeps_it() -> None:
    async def body(scene: Scene) -> None:
        adapter = await scene.loads.load("red", "/red")
        assert (adapter.digest, adapter.rank) == (RED, 8)
        assert all(RED in worker.held for worker in scene.workers)
        await scene.loads.drop(RED)
        assert not any(worker.held for worker in scene.workers)
        with pytest.raises(InvalidRequest, match=r"no worker keeps it: .*PE 0.*PE 3.*: path is /green"):
            await scene.loads.load("green", "/green")
        scene.workers[1].adapters["/red"] = BLUE
        with pytest.raises(AdapterRefused, match=r"must be the same on all hosts; .*PE 1.* read " + BLUE.hex()):
            await scene.loads.load("red", "/red")
        assert not any(worker.held for worker in scene.workers)

    with_scene(body)


def test_what_is_lacking_is_brought_and_what_fails_is_tried_again_later() -> None:
    async def body(scene: Scene) -> None:
        scene.names.update(named(red=RED, blue=BLUE))
        scene.workers[2].fails["LoadAdapter"] = ["RESOURCE_EXHAUSTED"]
        loads = scene.loads
        assert "PE 2" in await loads.bring()
        assert not await loads.bring()
        assert sum(len(worker.held) for worker in scene.workers) == 7
        scene.now += 60
        await loads.bring()
        assert sum(len(worker.held) for worker in scene.workers) == 8

    with_scene(body)


def test_a_worker_is_asked_once_for_what_two_looks_find_lacking() -> None:
    """A second reading of a folder would need memory of its own, and hears no refusal that the first did not."""

    async def body(scene: Scene) -> None:
        scene.names.update(named(red=RED, blue=BLUE))
        loads, link = scene.loads, scene.links[1]
        asked: list[bytes] = []
        load = link.load_adapter

        async def slowly(name: str, path: str, digest: bytes, timeout: float) -> worker_pb2.LoadedAdapter:
            asked.append(digest)
            await asyncio.sleep(0.1)
            return await load(name, path, digest, timeout)

        link.load_adapter = slowly  # type: ignore[method-assign]
        scene.workers[1].fails["LoadAdapter"] = ["go on", "RESOURCE_EXHAUSTED"]
        said = await asyncio.gather(loads.bring(), loads.bring())
        assert sorted(asked) == sorted([RED, BLUE])
        assert all("PE 1" in one for one in said)
        assert all(len(worker.held) == 2 - (number == 1) for number, worker in enumerate(scene.workers))

    with_scene(body)


def test_weights_that_no_name_stands_for_end_after_a_while() -> None:
    async def body(scene: Scene) -> None:
        loads = scene.loads
        scene.names.update(named(blue=BLUE))
        scene.hold(RED, BLUE)
        await loads._end_nameless()
        assert all(worker.held == {RED, BLUE} for worker in scene.workers)  # perhaps of an addition under way
        scene.now += STALE_SECONDS + 1
        await loads._end_nameless()
        assert all(worker.held == {BLUE} for worker in scene.workers)

    with_scene(body)
