"""The gateway's view of the islands: a connection to each worker that takes requests."""

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, NamedTuple

from tandem.cache.plan.arrays import Int64Array
from tandem.cluster.peers.placed_tokens import PlacedChanges, PlacedTokens
from tandem.cluster.peers.table import GatewayTable
from tandem.cluster.routing.held_prefixes import HeldPrefixes
from tandem.cluster.routing.membership import IslandState
from tandem.cluster.routing.policy import Ask, Key, Policy, WorkerLoad
from tandem.cluster.routing.prefix_view import PromptKeys
from tandem.cluster.routing.push_times import PushTimes
from tandem.cluster.routing.worker_link import WorkerLink
from tandem.proto import inference_pb2
from tandem.workers.config import Role

COPIED_TOKENS = 256
"""The cost of copying an adapter from host memory to the device, in prompt tokens: tens of megabytes take a few
milliseconds, and another adapter may have to come back later."""


class LinkPair(NamedTuple):
    """A policy.Pair with the connections to its workers."""

    decode: WorkerLink
    prefill: WorkerLink
    first_token_seconds: float
    matched_tokens: int = 0  # of the prompt, by what the prefill worker has reported


class IslandLinks:
    """One island in one epoch. Its links stay open after admission has stopped, until its requests are over."""

    def __init__(
        self,
        state: IslandState,
        max_message_bytes: int,
        prefixes: HeldPrefixes[Key],
        table: GatewayTable,
        pushes: PushTimes,
        kept: Sequence[WorkerLink] = (),
    ) -> None:
        """kept: links of workers that stay unchanged."""
        self.state = state
        known = {link.worker: link for link in kept}
        self.links = [
            known.get(worker)
            or WorkerLink(
                worker,
                state.name,
                state.epoch,
                max_message_bytes,
                prefixes,
                PlacedTokens(table, state.number, worker.pe),
                pushes,
            )
            for worker in state.workers
        ]

    @property
    def placed_tokens(self) -> int:
        return sum(link.load for link in self.links)

    async def close(self) -> None:
        """Closes all links. Calls under way fail."""
        await asyncio.gather(*(link.close() for link in self.links))


class Islands:
    """All islands by name, as their supervisors describe them. Owned by the gateway's event loop."""

    def __init__(
        self,
        max_message_bytes: int,
        policy: Policy,
        page_size: int,
        table: GatewayTable | None = None,
        *,
        any_decodes: bool = False,
    ) -> None:
        """table: of the gateway's processes; None if there is one process. any_decodes: whether the policy lets workers
        of both roles decode."""
        self._table = table or GatewayTable.alone()
        self._page_size = page_size
        self._max_message_bytes = max_message_bytes
        self._policy, self._any_decodes = policy, any_decodes
        self._prefixes: HeldPrefixes[Key] = HeldPrefixes()
        self._pushes = PushTimes()
        self._turn = 0
        self._current: dict[str, IslandLinks] = {}
        self._links: dict[Key, WorkerLink] | None = None  # until an island changes
        self._changes = PlacedChanges(self._table, [])  # of the links

    def links(self) -> dict[Key, WorkerLink]:
        """Returns the connections to all workers that take requests, grouped by island."""
        if self._links is None:
            self._links = {
                (name, link.pe): link
                for name, island in self._current.items()
                if island.state.workers
                for link in island.links
                if link.pe not in island.state.leaving
            }
            self._changes = PlacedChanges(self._table, [link.placed for link in self._links.values()])
            for link in self._links.values():
                link.known_load = None  # earlier changes are not reported
        return self._links

    def loads(self) -> list[WorkerLoad]:
        """Returns the loads that routing policies see, in the order of links(). Only workers that have changed are
        looked at again."""
        links = list(self.links().values())
        for number in self._changes.look():
            links[number].known_load = None
        return [link.known_load or link.worker_load() for link in links]

    def prompt_keys(self, token_ids: Int64Array, salt: bytes) -> PromptKeys:
        """Makes the keys by which pairs() finds a prompt's prefixes. Call it once a request: keys take time to make."""
        return PromptKeys(token_ids, self._page_size, salt)

    def pairs(self, ask: Ask, prompt: PromptKeys | None = None, adapter: bytes = b"") -> Iterator[LinkPair]:
        """Yields pairs in the routing policy's order. prompt: where given, ask gets its matches. adapter: digest of the
        LoRA adapter that both workers must hold; empty: none."""
        links = self.links()
        matches = ask.matches if prompt is None else self._prefixes.match(prompt)
        ask = Ask(ask.prompt_tokens, ask.max_tokens, matches, self._pushes.per_token)
        pairs = self._policy(self._holders(adapter) if adapter else self.loads(), ask, self._turn)
        self._turn += 1
        return (
            LinkPair(links[decode.key], links[prefill.key], seconds, ask.matches.get(prefill.key, 0))
            for decode, prefill, seconds in pairs
        )

    @property
    def has_one_decoder(self) -> bool:
        """True if a single worker decodes all requests."""
        return sum(self._any_decodes or link.role is Role.DECODE for link in self.links().values()) == 1

    def holds(self, adapter: bytes) -> bool:
        """Returns whether any worker that takes requests holds an adapter."""
        return any(adapter in link.adapters for link in self.links().values())

    def _holders(self, adapter: bytes) -> list[WorkerLoad]:
        """Returns loads() of workers that hold an adapter. A worker that must copy it to its device counts as more
        loaded."""
        return [
            load if adapter in link.resident_adapters else load.plus(COPIED_TOKENS)
            for load, link in zip(self.loads(), self.links().values(), strict=True)
            if adapter in link.adapters
        ]

    def serves(self, pair: LinkPair) -> bool:
        """Returns whether the pair can serve: the decode worker takes requests, and the prefill worker, which may be
        leaving, still sends prompts."""
        takes = pair.decode in self.links().values()
        serving = [link for island in self._current.values() if island.state.workers for link in island.links]
        return takes and pair.prefill in serving and pair.decode.reachable and pair.prefill.reachable

    def workers(self, name: str) -> list[WorkerLink]:
        """Returns the connections to an island's workers, those about to leave included."""
        return list(self._current[name].links) if name in self._current else []

    def placed_tokens(self, name: str) -> int:
        """Returns the tokens of this process's unfinished requests on the island, whether it takes new ones or not."""
        return self._current[name].placed_tokens if name in self._current else 0

    async def update(self, state: IslandState) -> bool:
        """Takes an island's new state, and returns whether it has new workers. A state that is older than the last is
        ignored."""
        before = self._current.get(state.name)
        if before is not None and state.version <= before.state.version:
            return False
        self._links = None
        if before is not None and not state.workers:
            before.state = state
            lost = [link for link in before.links if state.gone or link.pe in state.cut_off]
            for link in lost:
                link.end_watch()
            if state.gone:
                before.links = []
            await asyncio.gather(*(link.close() for link in lost))
            return False
        old = [] if before is None else before.links
        serving = {(worker, worker.epoch or state.epoch) for worker in state.workers}
        kept = [link for link in old if (link.worker, link.epoch) in serving]
        gone = [link for link in old if link not in kept]
        for link in gone:
            link.end_watch()  # before its successor, of the same key, is watched
        island = self._current[state.name] = IslandLinks(
            state, self._max_message_bytes, self._prefixes, self._table, self._pushes, kept
        )
        new = [link for link in island.links if link not in kept]
        for link in new:
            link.watch()
        await asyncio.gather(*(link.close() for link in gone))  # processes are gone, and calls to them wait in vain
        return bool(new)

    async def info(self, transport: str) -> list[inference_pb2.IslandInfo]:
        """Returns each island's own account. All are asked at once."""

        async def one(island: IslandLinks) -> inference_pb2.IslandInfo:
            state = island.state  # a later state would not fit the links
            serving = island.links if state.workers else []
            workers = await asyncio.gather(*(link.status() for link in serving))
            return inference_pb2.IslandInfo(
                name=state.name,
                epoch=state.epoch,
                transport=transport,
                workers=workers,
                restarts=state.restarts,
                host=state.host,
            )

        questions: list[Coroutine[Any, Any, inference_pb2.IslandInfo]] = [
            one(island) for _, island in sorted(self._current.items()) if not island.state.gone
        ]
        return list(await asyncio.gather(*questions))

    async def close(self) -> None:
        await asyncio.gather(*(island.close() for island in self._current.values()))
