"""The gateway's view of the islands: a connection to each worker that takes requests."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from tandem.cluster.routing.membership import IslandState
from tandem.cluster.routing.worker_link import WorkerLink
from tandem.proto import inference_pb2
from tandem.workers.config import Role


class IslandLinks:
    """One island in one epoch. Its links stay open after admission to it stopped, until what runs there is over."""

    def __init__(self, state: IslandState, max_message_bytes: int) -> None:
        self.state = state
        self.links = [WorkerLink.connect(worker, state.epoch, max_message_bytes) for worker in state.workers]
        self.prefill = [link for link in self.links if link.role == Role.PREFILL]
        self.decode = [link for link in self.links if link.role == Role.DECODE]

    @property
    def placed_tokens(self) -> int:
        return sum(link.load for link in self.links)

    async def close(self) -> None:
        """Calls under way fail."""
        await asyncio.gather(*(link.close() for link in self.links))


class Islands:
    """All islands by name. Owned by the gateway's event loop; the supervisor's word is the only source."""

    def __init__(self, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        self._current: dict[str, IslandLinks] = {}

    def pairs(self) -> list[tuple[WorkerLink, WorkerLink]]:
        """(decode, prefill) for each decode worker that can be reached, the least loaded first, with the least loaded
        prefill worker of its island."""
        found = []
        for island in self._current.values():
            prefill = [link for link in island.prefill if link.reachable]
            if island.state.workers and prefill:
                best = min(prefill, key=lambda link: link.load)
                found += [(decode, best) for decode in island.decode if decode.reachable]
        return sorted(found, key=lambda pair: pair[0].load)

    def placed_tokens(self, name: str) -> int:
        """Tokens of requests that are not yet over on the island, whether it takes new ones or not."""
        return self._current[name].placed_tokens if name in self._current else 0

    async def update(self, state: IslandState) -> None:
        """Takes the supervisor's word; an older one than the last is ignored."""
        before = self._current.get(state.name)
        if before is not None and state.version <= before.state.version:
            return
        if before is not None and not state.workers:
            before.state = state
            return
        self._current[state.name] = IslandLinks(state, self._max_message_bytes)
        if before is not None:
            await before.close()  # its processes are gone: whoever still waits for them waits in vain

    async def info(self, transport: str) -> list[inference_pb2.IslandInfo]:
        """What every island says of itself, asked at once."""

        async def one(island: IslandLinks) -> inference_pb2.IslandInfo:
            serving = island.links if island.state.workers else []
            workers = await asyncio.gather(*(link.status() for link in serving))
            state = island.state
            return inference_pb2.IslandInfo(
                name=state.name, epoch=state.epoch, transport=transport, workers=workers, restarts=state.restarts
            )

        questions: list[Coroutine[Any, Any, inference_pb2.IslandInfo]] = [
            one(self._current[name]) for name in sorted(self._current)
        ]
        return list(await asyncio.gather(*questions))

    async def close(self) -> None:
        await asyncio.gather(*(island.close() for island in self._current.values()))
