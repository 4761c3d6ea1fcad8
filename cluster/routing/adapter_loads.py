"""Loads LoRA adapters at workers: at all of them when an operator adds one, and at workers that come later."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from weakref import WeakKeyDictionary

from tandem.cluster.adapters.names import ServedNames
from tandem.cluster.adapters.values import Adapter
from tandem.cluster.errors import AdapterRefused, InvalidRequest, RequestRefused, WorkerCallError, WorkerFull
from tandem.cluster.routing.islands import Islands
from tandem.cluster.routing.worker_link import WorkerLink
from tandem.proto import worker_pb2

LOAD_SECONDS = 60.0  # for each worker to read an adapter
REMOVE_SECONDS = 10.0  # for each worker to forget one: it answers between two steps
LOOK_SECONDS = 1.0  # between two looks at what workers lack
AGAIN_SECONDS = 5.0  # until a worker that failed is asked again
STALE_SECONDS = 2 * LOAD_SECONDS  # after so long a held adapter without a name belongs to no running addition
REFUSALS = (RequestRefused, WorkerFull)
log = logging.getLogger(__name__)


class AdapterLoads:
    """Loads adapters. Owned by the gateway's event loop. Calls repeat safely: a worker that holds an adapter answers at
    once."""

    def __init__(self, islands: Islands, names: ServedNames, clock: Callable[[], float] = time.monotonic) -> None:
        self._islands = islands
        self._names = names
        self._clock = clock
        self._wake = asyncio.Event()
        self._turns: WeakKeyDictionary[WorkerLink, asyncio.Lock] = WeakKeyDictionary()  # bring()'s, at each worker
        self._failed: dict[tuple[WorkerLink, bytes], tuple[float, WorkerCallError]] = {}  # when, and how
        self._nameless: dict[tuple[WorkerLink, bytes], float] = {}  # since when

    async def load(self, name: str, path: str) -> Adapter:
        """Loads an adapter at all workers that take requests. They must read equal weights; otherwise no worker keeps
        it.

        Raises InvalidRequest if its folder is refused, otherwise AdapterRefused, with each worker's error.
        """
        links = list(self._islands.links().values())
        if not links:
            raise AdapterRefused("no worker takes requests now; add the adapter once one does")
        calls = (link.load_adapter(name, path, b"", LOAD_SECONDS) for link in links)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        loaded = {
            link: answer
            for link, answer in zip(links, answers, strict=True)
            if isinstance(answer, worker_pb2.LoadedAdapter)
        }
        failed = {link: answer for link, answer in zip(links, answers, strict=True) if isinstance(answer, Exception)}
        digests = {answer.digest for answer in loaded.values()}
        if failed or len(digests) != 1:
            await self._undo(loaded)
            raise _refusal(failed) if failed else _unlike(loaded)
        one = next(iter(loaded.values()))
        return Adapter(name, path, one.digest, one.rank, one.bytes)

    async def drop(self, digest: bytes) -> None:
        """Removes weights without a name from all workers. A worker that does not answer hears of it later: see
        run()."""
        if self._names.adapters.has_digest(digest):
            return
        links = [link for link in self._islands.links().values() if digest in link.adapters]
        await asyncio.gather(*(_remove(link, digest) for link in links))

    async def run(self) -> None:
        """Gives workers that come later the adapters that they lack, and removes what a failed addition left. Runs
        until cancelled."""
        while True:
            try:
                await self.bring()
                await self._end_nameless()
            except Exception:
                log.exception("workers' adapters could not be looked after")
            self._wake.clear()
            try:
                await asyncio.wait_for(self._wake.wait(), LOOK_SECONDS)
            except TimeoutError:
                continue

    def look(self) -> None:
        """Makes run() look now: workers or adapters have changed."""
        self._wake.set()

    async def bring(self) -> str:
        """Gives every worker the adapters that it lacks: all workers at once, each adapter after another. Returns in
        words what workers refused; empty if nothing. Other failures are tried again."""
        wanted = {one.digest: one for one in self._names.adapters.by_name.values()}
        now = self._clock()
        self._failed = {pair: failure for pair, failure in self._failed.items() if now - failure[0] < AGAIN_SECONDS}
        lacking = {
            link: missing
            for link in self._islands.links().values()
            if link.reachable
            and (missing := [wanted[one] for one in wanted.keys() - link.adapters if (link, one) not in self._failed])
        }
        said = await asyncio.gather(*(self._bring_to(link, missing) for link, missing in lacking.items()))
        return _in_words((link, error) for errors in said for link, error in errors if isinstance(error, REFUSALS))

    async def _bring_to(
        self, link: WorkerLink, adapters: Sequence[Adapter]
    ) -> list[tuple[WorkerLink, WorkerCallError]]:
        """Gives one worker these adapters. It is asked for one at a time: reading a folder twice at once would need
        memory for both."""
        async with self._turns.setdefault(link, asyncio.Lock()):
            for adapter in adapters:
                await self._bring_one(link, adapter)
        pairs = [(link, adapter.digest) for adapter in adapters]
        return [(link, self._failed[pair][1]) for pair in pairs if pair in self._failed]

    async def _bring_one(self, link: WorkerLink, adapter: Adapter) -> None:
        digest = adapter.digest
        if not self._names.adapters.has_digest(digest) or digest in link.adapters or (link, digest) in self._failed:
            return  # it was removed, or another bring() has asked the worker meanwhile
        try:
            await link.load_adapter(adapter.name, adapter.path, digest, LOAD_SECONDS)
        except WorkerCallError as error:
            self._failed[link, digest] = self._clock(), error
            log.warning("%s does not hold the adapter %r: %s", link.name, adapter.name, error)
            return
        if not self._names.adapters.has_digest(digest):
            await _remove(link, digest)

    async def _end_nameless(self) -> None:
        named = {one.digest for one in self._names.adapters.by_name.values()}
        now, held = (
            self._clock(),
            [(link, digest) for link in self._islands.links().values() for digest in link.adapters - named],
        )
        self._nameless = {pair: self._nameless.get(pair, now) for pair in held}
        old = [pair for pair, since in self._nameless.items() if now - since > STALE_SECONDS]
        await asyncio.gather(*(_remove(link, digest) for link, digest in old))

    async def _undo(self, loaded: dict[WorkerLink, worker_pb2.LoadedAdapter]) -> None:
        named = {one.digest for one in self._names.adapters.by_name.values()}
        ends = [(link, answer.digest) for link, answer in loaded.items() if answer.digest not in named]
        await asyncio.gather(*(_remove(link, digest) for link, digest in ends))


async def _remove(link: WorkerLink, digest: bytes) -> None:
    try:
        await link.remove_adapter(digest, REMOVE_SECONDS)
    except WorkerCallError as error:
        log.warning("%s may still hold the adapter %s: %s", link.name, digest.hex(), error)


def _refusal(failed: dict[WorkerLink, Exception]) -> Exception:
    refused = all(isinstance(error, RequestRefused) for error in failed.values())
    text = f"the adapter was not added, and no worker keeps it: {_in_words(failed.items())}"
    return InvalidRequest(text) if refused else AdapterRefused(text)


def _in_words(errors: Iterable[tuple[WorkerLink, Exception]]) -> str:
    """Joins the workers' errors, each text once."""
    said: defaultdict[str, list[str]] = defaultdict(list)
    for link, error in errors:
        said[str(error)].append(link.name)
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in said.items())


def _unlike(loaded: dict[WorkerLink, worker_pb2.LoadedAdapter]) -> AdapterRefused:
    read = ", ".join(f"{link.name} read {answer.digest.hex()}" for link, answer in loaded.items())
    return AdapterRefused(f"the adapter was not added: its folder must be the same on all hosts; {read}")
