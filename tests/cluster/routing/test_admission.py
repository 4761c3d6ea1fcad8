"""Tests the turns of waiting requests, and how many may wait."""

import asyncio
import mmap
from collections import Counter
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.cluster.errors import Overloaded
from tandem.cluster.peers.table import Column, GatewayTable, table_bytes
from tandem.cluster.routing.admission import AdmissionQueue


async def settle() -> None:
    """Lets every task go as far as it can."""
    for _ in range(5):
        await asyncio.sleep(0)


class Crowd:
    """Requests that wait for their turn and keep it until the test ends it."""

    def __init__(self, queue: AdmissionQueue) -> None:
        self.queue = queue
        self.served: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def join(
        self, client: str, name: str, tokens: int = 1, admitted: bool = False, requests: int = 1, priority: int = 0
    ) -> None:
        self._ends[name] = asyncio.Event()
        waiting = self._wait(client, name, tokens, admitted, requests, priority)
        self.tasks[name] = asyncio.create_task(waiting)
        await settle()

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await settle()

    async def cancel(self, name: str) -> None:
        self.tasks[name].cancel()
        await settle()

    def waiting(self) -> set[str]:
        """Names of those that wait or have the turn."""
        return {name for name, task in self.tasks.items() if not task.done()}

    async def end_all(self) -> list[str]:
        """Ends all requests, and returns the names of those served, in order."""
        for end in self._ends.values():
            end.set()
        for task in self.tasks.values():
            with suppress(Overloaded, asyncio.CancelledError):
                await asyncio.wait_for(task, 5)
        return self.served

    async def _wait(self, client: str, name: str, tokens: int, admitted: bool, requests: int, priority: int) -> None:
        async with self.queue.turn(client, tokens, admitted=admitted, requests=requests, priority=priority):
            self.served.append(name)
            await self._ends[name].wait()


def test_one_that_counts_as_several() -> None:
    """It fills the queue as they would, takes their turns, and may wait alone however many it is."""

    async def run() -> None:
        queue = AdmissionQueue(4, 100)
        crowd = Crowd(queue)
        await crowd.join("a", "six", requests=6)
        assert queue.requests == 6
        await crowd.join("b", "refused")
        assert crowd.waiting() == {"six"}
        await crowd.end("six")
        assert queue.requests == 0
        await crowd.join("a", "three", requests=3)
        await crowd.join("a", "two too many", requests=2)
        await crowd.join("b", "one")
        assert crowd.waiting() == {"three", "one"}
        assert await crowd.end_all() == ["six", "three", "one"]
        assert queue.requests == 0

    asyncio.run(run())


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12))
def test_clients_take_turns(clients: list[str]) -> None:
    """No client gets a second turn while another waits for its first, and so on; each client's are in their order."""

    async def run() -> None:
        crowd = Crowd(AdmissionQueue(100, 100))
        arrivals = [(client, f"{client}{number}") for number, client in enumerate(clients)]
        for client, name in arrivals:
            await crowd.join(client, name)
        for _ in arrivals:
            await crowd.end(crowd.served[-1])
        assert (crowd.queue.requests, crowd.queue.tokens) == (0, 0)
        assert_fair(crowd.served, [name for _, name in arrivals])

    asyncio.run(run())


def assert_fair(served: list[str], arrivals: list[str]) -> None:
    """arrivals: of the names that waited; a name begins with its client's letter."""
    assert sorted(served) == sorted(arrivals)
    for client in {name[0] for name in arrivals}:
        assert [name for name in served if name[0] == client] == [name for name in arrivals if name[0] == client]
    turns = Counter[str]()
    for number, name in enumerate(served):
        turns[name[0]] += 1
        for other in {name[0] for name in served[number + 1 :]}:
            assert turns[name[0]] <= turns[other] + 1, served


class Place:
    """Room for one request at a time, that heads of the queues of several processes compete for."""

    def __init__(self, tables: list[GatewayTable]) -> None:
        self.queues = [AdmissionQueue(100, 1000, table) for table in tables]
        self.served: list[str] = []
        self.taken = True

    async def ask(self, process: int, name: str) -> None:
        queue = self.queues[process]
        async with queue.turn(name[0], 1):
            while True:
                await queue.first()
                queue.room.clear()
                if not self.taken:
                    self.taken = True
                    self.served.append(name)
                    return
                await queue.room.wait()

    def free(self, process: int) -> None:
        self.taken = False
        self.queues[process].room.set()


def tables(processes: int) -> list[GatewayTable]:
    memory = mmap.mmap(-1, table_bytes(processes, 1))
    views = [GatewayTable(memory, processes, 1, process, "key") for process in range(processes)]
    for number, view in enumerate(views):
        view.put(Column.SOCKET, 1 + number)
    return views


@pytest.mark.parametrize("freed_by", [0, 1])
@pytest.mark.parametrize(
    "waiting",
    [
        ["0a0", "0a1", "1a2", "1a3", "0b0", "0b1", "1c0", "1c1"],  # a is spread over both processes
        ["0a0", "1a1", "0a2", "1a3", "1b0", "1b1", "1b2"],
        ["0a0", "0b0", "0c0", "0d0", "1e0", "1e1", "1e2"],
    ],
)
def test_a_client_of_several_processes_has_no_more_turns(waiting: list[str], freed_by: int) -> None:
    """Also where it is always the same process whose requests end."""

    async def run() -> None:
        place = Place(tables(2))
        asked = []
        for each in waiting:
            asked.append(asyncio.create_task(place.ask(int(each[0]), each[1:])))
            await asyncio.sleep(0.001)
        for number in range(len(waiting)):
            place.free(freed_by)
            while len(place.served) == number:
                await asyncio.sleep(0.001)
        await asyncio.gather(*asked)
        turns = Counter[str]()
        for number, name in enumerate(place.served):
            turns[name[0]] += 1
            for other in {name[0] for name in place.served[number + 1 :]}:
                assert turns[name[0]] <= turns[other] + 1, place.served
        assert not place.queues[0].waits

    asyncio.run(run())


def test_bounds_hold_for_all_processes_together() -> None:
    async def run() -> None:
        one, other = (AdmissionQueue(2, 10, table) for table in tables(2))
        async with one.turn("a", 1), other.turn("b", 1):
            for queue in (one, other):
                with pytest.raises(Overloaded, match=r"2 requests are queued; gateway\.max_queued is 2"):
                    async with queue.turn("c", 1):
                        pass
            assert (one.waits, other.waits) == (True, True)
        async with one.turn("a", 8):
            with pytest.raises(Overloaded, match=r"8 tokens are queued and the request asks for 3"):
                async with other.turn("c", 3):
                    pass
        assert (one.waits, other.waits) == (False, False)

    asyncio.run(run())


def test_who_is_silent_or_gone_is_not_waited_for() -> None:
    async def run() -> None:
        views = tables(2)
        one, other = (AdmissionQueue(9, 10, table) for table in views)
        async with one.turn("a", 1), other.turn("b", 1):
            await asyncio.wait_for(one.first(), 5)
            assert other._is_behind()
            await asyncio.wait_for(other.first(), 5)  # the first one does not look for room any more
            await one.first()
            assert other._is_behind()
            views[1].clear(0, restarts=0)
            assert not other._is_behind()

    asyncio.run(run())


def test_one_client_with_much_does_not_hold_up_another() -> None:
    async def run() -> None:
        crowd = Crowd(AdmissionQueue(100, 100))
        for number in range(10):
            await crowd.join("much", f"much{number}")
        await crowd.join("little", "little")
        await crowd.end("much0")
        assert crowd.served == ["much0", "little"]
        for task in crowd.tasks.values():
            task.cancel()

    asyncio.run(run())


@given(st.lists(st.integers(0, 5), max_size=6), st.integers(0, 5))
def test_who_goes_away_holds_up_nobody(leavers: list[int], ended: int) -> None:
    """It may have waited, have just been given its turn, or have it."""

    async def run() -> None:
        crowd = Crowd(AdmissionQueue(100, 100))
        for number in range(6):
            await crowd.join("ab"[number % 2], str(number))
        crowd._ends[str(ended)].set()  # and without giving anybody time:
        for leaver in leavers:
            await crowd.cancel(str(leaver))
        for number in range(6):
            await crowd.end(str(number))
        for task in crowd.tasks.values():
            with suppress(asyncio.CancelledError):
                await asyncio.wait_for(task, 5)
        assert {str(number) for number in range(6)} - set(map(str, leavers)) <= set(crowd.served)
        assert (crowd.queue.requests, crowd.queue.tokens) == (0, 0)

    asyncio.run(run())


def test_a_turn_given_to_one_that_was_cancelled_at_that_moment_goes_on() -> None:
    async def run() -> None:
        crowd = Crowd(AdmissionQueue(100, 100))
        for name in ("0", "1", "2"):
            await crowd.join("a", name)
        crowd._ends["0"].set()
        await asyncio.sleep(0)  # 0 passes its turn on to 1, which has not run yet
        crowd.tasks["1"].cancel()
        await settle()
        assert crowd.served == ["0", "2"]
        await crowd.end("2")
        assert (crowd.queue.requests, crowd.queue.tokens) == (0, 0)

    asyncio.run(run())


def test_bounds_name_their_key_and_say_when_to_come_again() -> None:
    async def run() -> None:
        crowd = Crowd(AdmissionQueue(2, 10))
        await crowd.join("a", "large", tokens=50)  # alone it may wait, whatever it asks for
        assert crowd.served == ["large"]
        with pytest.raises(Overloaded, match=r"50 tokens are queued .* asks for 1; gateway.max_queued_tokens is 10"):
            async with crowd.queue.turn("b", 1):
                pass
        await crowd.end("large")
        await crowd.join("a", "one")
        await crowd.join("c", "two")
        with pytest.raises(Overloaded, match=r"2 requests are queued; gateway.max_queued is 2") as caught:
            async with crowd.queue.turn("b", 1):
                pass
        assert 0.1 <= caught.value.retry_after_seconds < 60
        for task in crowd.tasks.values():
            task.cancel()

    asyncio.run(run())


def test_a_full_queue_takes_what_was_admitted_before() -> None:
    """A request that lost its workers comes back: its client has its first tokens."""

    async def run() -> None:
        crowd = Crowd(AdmissionQueue(1, 10))
        await crowd.join("a", "first")
        await crowd.join("b", "back again", tokens=50, admitted=True)
        assert crowd.waiting() == {"first", "back again"}
        assert await crowd.end_all() == ["first", "back again"]

    asyncio.run(run())


class TestFullQueues:
    def test_the_newest_of_the_client_with_most_gives_way(self) -> None:
        async def run() -> None:
            crowd = Crowd(AdmissionQueue(6, 100))
            for client, name in ("aA", "aB", "bC", "aD", "cE", "aF"):
                await crowd.join(client, name)
            await crowd.join("d", "G")  # 1 where a has 4
            with pytest.raises(Overloaded, match="its newest request gives way") as caught:
                await crowd.tasks["F"]
            assert caught.value.retry_after_seconds > 0
            await crowd.join("d", "H")  # 2 where a has 3
            await crowd.join("d", "I")  # 3 where a has 2
            await crowd.join("a", "J")  # 3 where it has most itself
            for refused in ("I", "J"):
                with pytest.raises(Overloaded, match=r"gateway\.max_queued is 6"):
                    await crowd.tasks[refused]
            served = await crowd.end_all()
            assert sorted(served) == list("ABCEGH")
            assert (crowd.queue.requests, crowd.queue.tokens, crowd.queue._waiting) == (0, 0, {})

        asyncio.run(run())

    def test_what_was_admitted_before_stays(self) -> None:
        async def run() -> None:
            crowd = Crowd(AdmissionQueue(3, 100))
            await crowd.join("a", "head")
            for name in ("lost", "lost too"):
                await crowd.join("a", name, admitted=True)
            await crowd.join("b", "new")
            with pytest.raises(Overloaded, match=r"gateway\.max_queued is 3"):
                await crowd.tasks["new"]
            assert await crowd.end_all() == ["head", "lost", "lost too"]

        asyncio.run(run())

    def test_who_waits_for_most_tokens_makes_room_for_few(self) -> None:
        """It makes room as often as it takes: here two of its requests for one of another's."""

        async def run() -> None:
            crowd = Crowd(AdmissionQueue(100, 100))
            for number in range(5):
                await crowd.join("a", f"a{number}", tokens=20)
            for number in range(3):
                await crowd.join("b", f"b{number}", tokens=10)
            with pytest.raises(Overloaded):
                await crowd.tasks["a4"]
            with pytest.raises(Overloaded):
                await crowd.tasks["a3"]
            await crowd.join("c", "c", tokens=70)
            with pytest.raises(Overloaded, match=r"asks for 70; gateway\.max_queued_tokens is 100"):
                await crowd.tasks["c"]
            assert sorted(await crowd.end_all()) == ["a0", "a1", "a2", "b0", "b1", "b2"]

        asyncio.run(run())

    @pytest.mark.parametrize("there", [True, False])
    def test_in_another_process(self, there: bool) -> None:
        async def run() -> None:
            views, asked = tables(2), []

            async def ask(client: int) -> bool:
                asked.append(client)
                return there and other.give_way(client)

            one, other = AdmissionQueue(4, 100, views[0], ask), AdmissionQueue(4, 100, views[1])
            here, elsewhere = Crowd(one), Crowd(other)
            for number in range(4):
                await elsewhere.join("a", f"a{number}")
            await here.join("b", "b")
            assert asked == [views[0].client_column("a")]
            gave_way, refused = ("a3", elsewhere), ("b", here)
            name, crowd = gave_way if there else refused
            with pytest.raises(Overloaded, match="gives way" if there else "max_queued is 4"):
                await crowd.tasks[name]
            assert len(await elsewhere.end_all() + await here.end_all()) == 4
            assert not one.waits

        asyncio.run(run())

    @given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 12)), max_size=40))
    def test_bounds_hold_and_nobody_is_turned_away_for_one_with_more(self, arrivals: list[tuple[str, int]]) -> None:
        async def run() -> None:
            crowd = Crowd(AdmissionQueue(8, 40))
            for number, (client, tokens) in enumerate(arrivals):
                before = crowd.waiting()
                await crowd.join(client, f"{client}{number}", tokens)
                now = crowd.waiting()
                assert crowd.queue.requests <= 8
                assert crowd.queue.tokens <= 40
                for gone in before - now:
                    assert gone[0] != client, "its own never gives way"
                    for held in (lambda name: 1, lambda name: arrivals[int(name[1:])][1]):
                        if sum(held(one) for one in before if one[0] == gone[0]) > sum(
                            held(one) for one in now if one[0] == client
                        ) - held(f"{client}{number}"):
                            break
                    else:
                        raise AssertionError(f"{gone} gave way to {client}{number}")
            await crowd.end_all()
            assert (crowd.queue.requests, crowd.queue.tokens) == (0, 0)
            assert crowd.queue._table.largest_client(by_tokens=False)[1] == 0
            assert crowd.queue._table.largest_client(by_tokens=True)[1] == 0

        asyncio.run(run())

    def test_those_that_leave_take_no_memory(self) -> None:
        """A queue may stand still for long while clients come and go."""

        async def run() -> None:
            crowd = Crowd(AdmissionQueue(100, 100))
            await crowd.join("a", "head")
            for number in range(200):
                await crowd.join("b", str(number))
                await crowd.cancel(str(number))
            assert len(crowd.queue._waiting) < 10
            await crowd.end_all()

        asyncio.run(run())


def test_lower_priorities_go_first_and_who_waits_rises() -> None:
    async def run(priority_seconds: float) -> list[str]:
        crowd = Crowd(AdmissionQueue(100, 100, priority_seconds=priority_seconds))
        for client, name, priority in (("a", "head", 0), ("a", "last", 9), ("a", "0 1", 0), ("b", "first", -1)):
            await crowd.join(client, name, priority=priority)
        await crowd.join("a", "0 2", priority=0)
        await crowd.join("b", "0 b", priority=0)
        for _ in range(6):
            await crowd.end(crowd.served[-1])
        assert (crowd.queue.requests, crowd.queue.tokens) == (0, 0)
        return crowd.served

    assert asyncio.run(run(1e6)) == ["head", "first", "0 b", "0 1", "0 2", "last"]
    # Each has risen by far more than nine priorities since it came. That of 0 b counts for the others of its priority.
    assert asyncio.run(run(1e-9)) == ["head", "last", "first", "0 b", "0 1", "0 2"]


class Slots:
    """Room for each group, that heads of the queues of several processes look for. Requests are named by their group,
    process and number."""

    def __init__(self, tables: list[GatewayTable], lacking: set[str]) -> None:
        self.queues = [AdmissionQueue(100, 1000, table) for table in tables]
        self.lacking, self.served, self.looks = lacking, list[str](), Counter[str]()

    async def ask(self, name: str, priority: int = 0) -> None:
        queue, group = self.queues[int(name[1])], name[0]
        async with queue.turn(name, 1, priority=priority, group=group.encode()):
            while True:
                await queue.first()
                queue.room.clear()
                self.looks[group] += 1
                if group not in self.lacking:
                    self.served.append(name)
                    return
                if not queue.let_pass():
                    with suppress(TimeoutError):
                        await asyncio.wait_for(queue.room.wait(), 0.1)


@pytest.mark.parametrize("processes", [1, 2])
def test_groups_that_lack_room_of_their_own_hold_up_no_other(processes: int) -> None:
    """Those of one group keep their order, and a group that is aside asks again now and then, in each process."""

    async def run() -> None:
        slots = Slots(tables(processes), {"a", "b"})
        last = processes - 1
        early = [asyncio.ensure_future(slots.ask(name)) for name in ("a01", f"b{last}1", "a02", f"b{last}2")]
        await asyncio.sleep(0.02)
        for number in range(20):
            for process in range(processes):
                await asyncio.wait_for(slots.ask(f"c{process}{number}"), 0.5)
        assert not any(one.done() for one in early)
        before = slots.looks.copy()
        await asyncio.sleep(0.55)
        for group in "ab":
            assert 2 <= slots.looks[group] - before[group] <= 12
        slots.served.clear()
        slots.lacking -= {"b"}
        await asyncio.wait_for(asyncio.gather(*early[1::2]), 1)
        slots.lacking.clear()
        await asyncio.wait_for(asyncio.gather(*early), 1)
        assert slots.served == [f"b{last}1", f"b{last}2", "a01", "a02"]
        assert all(queue.requests == 0 for queue in slots.queues)

    asyncio.run(run())


def test_one_of_a_lower_priority_goes_first_within_its_group_and_before_others() -> None:
    async def run() -> None:
        slots = Slots(tables(1), {"a", "b"})
        names = (("a01", 0), ("b01", 0), ("a02", -1), ("b02", 1), ("b03", 0))
        tasks = [asyncio.ensure_future(slots.ask(*one)) for one in names]
        await asyncio.sleep(0.25)
        slots.lacking.clear()
        await asyncio.wait_for(asyncio.gather(*tasks), 2)
        assert [name for name in slots.served if name[0] == "a"] == ["a02", "a01"]
        assert [name for name in slots.served if name[0] == "b"] == ["b01", "b03", "b02"]

    asyncio.run(run())


def test_turns_that_are_handed_over_do_not_shorten_what_a_full_queue_says() -> None:
    """retry_after_seconds follows from turns that ended, here none: the first guess is 1 s a turn."""

    async def run() -> None:
        slots = Slots(tables(1), set("abcdefgh"))
        queue = slots.queues[0]
        queue._max_requests = 8
        tasks = [asyncio.ensure_future(slots.ask(f"{group}01")) for group in "abcdefgh"]
        await asyncio.sleep(0.5)
        assert sum(slots.looks.values()) > 16
        with pytest.raises(Overloaded) as caught:
            await slots.ask("h02")
        assert caught.value.retry_after_seconds == 4
        slots.lacking.clear()
        await asyncio.wait_for(asyncio.gather(*tasks), 2)

    asyncio.run(run())


def test_one_of_a_group_that_is_aside_is_cancelled() -> None:
    async def run() -> None:
        slots = Slots(tables(1), {"a"})
        first, second = (asyncio.ensure_future(slots.ask(name)) for name in ("a01", "a02"))
        await asyncio.sleep(0.05)
        first.cancel()
        await asyncio.wait_for(slots.ask("c01"), 0.5)
        slots.lacking.clear()
        await asyncio.wait_for(second, 1)
        assert slots.served == ["c01", "a02"]
        assert slots.queues[0].requests == 0

    asyncio.run(run())
