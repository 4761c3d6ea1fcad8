"""Turns: how many run, and whose is the next."""

import asyncio

from tandem.workers.service.turns import ClientTurns


def test_clients_take_turns_and_have_one_place_each() -> None:
    async def run() -> list[str]:
        turns, order = ClientTurns(2), list[str]()
        running: list[str] = []

        async def work(client: str, name: str) -> None:
            async with turns.turn(client):
                assert client not in running
                running.append(client)
                assert len(running) <= 2
                order.append(name)
                await asyncio.sleep(0)
                running.remove(client)

        names = ["a1", "a2", "a3", "b1", "c1", "b2"]
        await asyncio.gather(*(work(name[0], name) for name in names))
        assert turns.waiting == 0
        return order

    order = asyncio.run(run())
    assert order[:2] == ["a1", "b1"]
    assert order.index("c1") < order.index("a3")
    assert order.index("b2") < order.index("a3")
    assert sorted(order) == ["a1", "a2", "a3", "b1", "b2", "c1"]


def test_who_goes_away_leaves_no_place_behind() -> None:
    async def run() -> None:
        turns, release = ClientTurns(1), asyncio.Event()

        async def work(client: str) -> str:
            async with turns.turn(client):
                await release.wait()
            return client

        first, gone, last = (asyncio.ensure_future(work(client)) for client in "abc")
        await asyncio.sleep(0)
        assert turns.waiting == 2
        gone.cancel()
        release.set()
        assert await asyncio.wait_for(asyncio.gather(first, last), 10) == ["a", "c"]
        first = asyncio.ensure_future(work("b"))
        assert await asyncio.wait_for(first, 10) == "b"
        assert turns.waiting == 0

    asyncio.run(run())
