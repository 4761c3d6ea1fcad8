"""LoRA adapters that operators add, remove and list while the cluster serves: for gRPC and HTTP alike."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tandem.cluster.adapters.folders import check_folder
from tandem.cluster.adapters.names import ServedNames, shown
from tandem.cluster.adapters.values import Adapter, AdapterSet, check_name
from tandem.cluster.config.adapters import AdaptersSection
from tandem.cluster.config.model import usable_path
from tandem.cluster.errors import AdapterRefused, InvalidRequest, Overloaded, UnknownModel
from tandem.cluster.routing.adapter_loads import AdapterLoads
from tandem.cluster.routing.islands import Islands
from tandem.proto import admin_pb2, inference_pb2
from tandem.workers.event_loop import unwatched

MOST_WAITING = 64  # changes of one process; a caller that goes away does not end its own
AGAIN_SECONDS = 5.0

Commit = Callable[[str, Adapter | None, bytes], Awaitable[AdapterSet]]
"""Changes what a name stands for, for all gateway processes: the name, its adapter or None, and the digest that it must
have before, empty for a free name. Raises AdapterRefused and UnknownModel."""


class AdapterChanges:
    """Owned by the gateway's event loop. In one process one change goes on at a time; AdapterBook orders processes."""

    def __init__(
        self, section: AdaptersSection, names: ServedNames, loads: AdapterLoads, islands: Islands, commit: Commit
    ) -> None:
        self._section = section
        self._names = names
        self._loads = loads
        self._islands = islands
        self._commit = commit
        self._turn = asyncio.Lock()
        self._under_way: set[asyncio.Future[admin_pb2.ServedAdapter]] = set()

    async def add(self, name: str, path: str, *, load_inplace: bool = False) -> admin_pb2.ServedAdapter:
        """Returns when requests may name it. Raises InvalidRequest, AdapterRefused, Overloaded and DeadlineExceeded;
        then nothing has changed. A caller that goes away does not stop what it began."""
        self._check_name(name)
        folder = await asyncio.to_thread(self._folder, path)
        await asyncio.to_thread(check_folder, folder, self._section.max_rank)
        return await self._beside(self._add(name, str(folder), load_inplace=load_inplace))

    async def remove(self, name: str) -> admin_pb2.ServedAdapter:
        """Removes a name everywhere. Returns what it stood for. Raises UnknownModel if it stands for nothing."""
        return await self._beside(self._remove(name))

    async def list(self) -> list[admin_pb2.ServedAdapter]:
        """Asks all workers."""
        links = self._islands.links().values()
        held = [one for info in await asyncio.gather(*(link.status() for link in links)) for one in info.adapters]
        return [_listed(one, held, len(links)) for _, one in sorted(self._names.adapters.by_name.items())]

    async def _beside(self, change: Coroutine[Any, Any, admin_pb2.ServedAdapter]) -> admin_pb2.ServedAdapter:
        if len(self._under_way) >= MOST_WAITING:
            change.close()
            raise Overloaded(f"{MOST_WAITING} changes of adapters wait already, one after another", AGAIN_SECONDS)
        task = unwatched(asyncio.ensure_future(change))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Ends changes under way."""
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)

    async def _add(self, name: str, path: str, *, load_inplace: bool) -> admin_pb2.ServedAdapter:
        async with self._turn:
            known = self._names.adapters.by_name
            before = known.get(name)
            if before is None and len(known) >= self._section.max_adapters:
                raise AdapterRefused(
                    f"{len(known)} adapters are loaded; at most {self._section.max_adapters} may be "
                    "(adapters.max_adapters): remove one first"
                )
            adapter = await self._loads.load(name, path)
            if before is not None and before.digest == adapter.digest:
                return self._served(before)
            try:
                if before is not None and not load_inplace:
                    _refuse_second(name, before)
                await self._commit(name, adapter, b"" if before is None else before.digest)
            except Exception:
                await self._loads.drop(adapter.digest)
                raise
            if before is not None:
                await self._loads.drop(before.digest)
            return self._served(adapter)

    async def _remove(self, name: str) -> admin_pb2.ServedAdapter:
        async with self._turn:
            before = self._names.adapters.by_name.get(name)
            if before is None:
                names = tuple(self._names.adapters.by_name)
                are = f"{shown(names)} loaded" if names else "none is loaded"
                raise UnknownModel(f"the adapter {name!r:.160} cannot be found; {are}")
            await self._commit(name, None, before.digest)
            served = self._served(before)
            await self._loads.drop(before.digest)
            return served

    def _check_name(self, name: str) -> None:
        if not self._section.is_on:
            raise InvalidRequest("adapters.max_resident is 0, so no adapter is served; set it to at least 1")
        try:
            check_name(name)
        except ValueError as error:
            raise InvalidRequest(f"name is {name!r:.160}; it {error}") from None
        if name in self._names.model:
            raise InvalidRequest(f"name is {name!r}, which is a name of the model; choose another one")

    def _folder(self, path: str) -> Path:
        """Returns the folder without links. Raises InvalidRequest for a folder that may not be loaded."""
        section = self._section
        try:
            given = Path(usable_path(path))
            folder = given.resolve()
        except (ValueError, OSError, RuntimeError) as error:
            raise InvalidRequest(f"path is {path!r:.160}; it {error}") from None
        if not given.is_absolute():
            raise InvalidRequest(f"path is {path!r:.160}; it must be absolute: the gateway has another folder")
        allowed = [Path(one).resolve() for one in section.folders.values()]
        if section.allowed_root is not None and folder.is_relative_to(Path(section.allowed_root)):
            return folder
        if folder not in allowed:
            under = f"under {section.allowed_root} or " if section.allowed_root is not None else ""
            raise InvalidRequest(
                f"path is {path!r:.160}; it must be {under}a folder of adapters.folders (adapters.allowed_root)"
            )
        return folder

    def _served(self, adapter: Adapter) -> admin_pb2.ServedAdapter:
        links = list(self._islands.links().values())
        return admin_pb2.ServedAdapter(
            name=adapter.name,
            path=adapter.path,
            digest=adapter.digest,
            rank=adapter.rank,
            bytes=adapter.num_bytes,
            workers=len(links),
            holding=sum(adapter.digest in link.adapters for link in links),
            resident=sum(adapter.digest in link.resident_adapters for link in links),
        )


def _listed(adapter: Adapter, held: Sequence[inference_pb2.AdapterInfo], workers: int) -> admin_pb2.ServedAdapter:
    """held: of all workers."""
    own = [one for one in held if one.digest == adapter.digest and not one.removed]
    return admin_pb2.ServedAdapter(
        name=adapter.name,
        path=adapter.path,
        digest=adapter.digest,
        rank=adapter.rank,
        bytes=max((one.bytes for one in own), default=adapter.num_bytes),
        workers=workers,
        holding=len(own),
        resident=sum(one.resident for one in own),
    )


def _refuse_second(name: str, before: Adapter) -> NoReturn:
    """Refuses the name in the words that vLLM's clients know."""
    raise AdapterRefused(
        f"The lora adapter {name!r} has already been loaded, from {before.path} with other weights. Remove it first, "
        "or replace it: set load_inplace to true, or give `tandem adapter add` the option --load-inplace."
    )
