"""The calls that load LoRA adapters into a worker and remove them, and the check that it holds a request's."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TypeVar
from weakref import WeakValueDictionary

from tandem.proto import inference_pb2, worker_pb2
from tandem.workers.adapters.held_adapter import HeldAdapter
from tandem.workers.adapters.peft_folder import Found
from tandem.workers.config import AdapterSettings
from tandem.workers.engine.engine import Engine
from tandem.workers.errors import AdapterNotHeld, BadAdapter, InvalidCall
from tandem.workers.event_loop import unwatched
from tandem.workers.service.call_checks import check_digest
from tandem.workers.wire.prompt_spec import PromptSpec

T = TypeVar("T")
OnStepThread = Callable[[Callable[[], T]], Awaitable[T]]
MAX_NAME, MAX_PATH = 256, 4096  # characters
POLL_SECONDS = 0.005  # between looks at what other ranks have read


class AdapterLoads:
    """Loads the adapters of one worker. Folders are read during its steps."""

    def __init__(
        self, engine: Engine, settings: AdapterSettings, call: Callable[[Callable[[], object]], object]
    ) -> None:
        """call: has something done on the step thread, which owns the engine."""
        self._engine, self._settings, self._call = engine, settings, call
        self._number = 0
        self._turns: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()  # by digest

    async def load(
        self, request: worker_pb2.LoadAdapterRequest, on_step_thread: OnStepThread
    ) -> worker_pb2.LoadedAdapter:
        """on_step_thread: its result or its error. Raises InvalidCall, BadAdapter and NoRoom. Gateways of several hosts
        may ask for the same weights at a time, which are read once."""
        self._check(request)
        if not request.digest:
            return await self._load(request, on_step_thread)
        async with self._turns.setdefault(request.digest, asyncio.Lock()):
            return await self._load(request, on_step_thread)

    async def _load(
        self, request: worker_pb2.LoadAdapterRequest, on_step_thread: OnStepThread
    ) -> worker_pb2.LoadedAdapter:
        self._number = number = self._number + 1
        engine = self._engine

        def begin() -> "Future[Found] | worker_pb2.LoadedAdapter":
            if engine.holds_adapter(request.digest) and (held := _held(engine, request.digest)).name == request.name:
                return _loaded(held)  # there may be no memory to read it once more
            engine.read_adapter(number, request.name, request.path)
            return engine.adapter_read(number)

        def end() -> worker_pb2.LoadedAdapter:
            engine.load_adapter(number, found.digest)
            return _loaded(_held(engine, found.digest))

        try:
            reading = await on_step_thread(begin)
            if isinstance(reading, worker_pb2.LoadedAdapter):
                return reading
            found = await asyncio.shield(unwatched(asyncio.wrap_future(reading)))
            if request.digest not in (b"", found.digest):
                raise BadAdapter(
                    f"path {request.path} has the adapter {found.digest.hex()}; it must be {request.digest.hex()}"
                )
            await self._agree(number, found.digest, request.path)
        except BaseException:
            self._call(lambda: engine.drop_adapter(number))
            raise
        return await on_step_thread(end)

    async def _agree(self, number: int, digest: bytes, path: str) -> None:
        """Returns once all ranks of the worker have read the same. Raises BadAdapter."""
        while (agree := self._engine.ranks_have_read(number, digest)) is None:
            await asyncio.sleep(POLL_SECONDS)
        if not agree:
            raise BadAdapter(
                f"path {path} has changed while it was read: ranks of this worker have read different files: add it "
                "again when it stays as it is"
            )

    async def remove(
        self, request: worker_pb2.RemoveAdapterRequest, on_step_thread: OnStepThread
    ) -> worker_pb2.RemoveAdapterResponse:
        """Raises InvalidCall."""
        check_digest(request.digest, "digest")

        def remove() -> bool:
            known = self._engine.holds_adapter(request.digest)
            if known:
                self._engine.remove_adapter(request.digest)
            return known

        return worker_pb2.RemoveAdapterResponse(known=await on_step_thread(remove))

    def _check(self, request: worker_pb2.LoadAdapterRequest) -> None:
        for field, text, most in (("name", request.name, MAX_NAME), ("path", request.path, MAX_PATH)):
            if not 1 <= len(text) <= most or "\0" in text:
                raise InvalidCall(
                    f"{field} has {len(text)} characters; it must have from 1 to {most}, none of them NUL"
                )
        if request.digest:
            check_digest(request.digest, "digest")
        if not self._settings.max_resident:
            raise InvalidCall(f"path {request.path:.80}: adapters.max_resident is 0; it must be at least 1")


def _held(engine: Engine, digest: bytes) -> HeldAdapter:
    return next(one for one in engine.adapters if one.digest == digest)


def _loaded(held: HeldAdapter) -> worker_pb2.LoadedAdapter:
    return worker_pb2.LoadedAdapter(digest=held.digest, rank=held.rank, bytes=held.bytes)


def check_held(engine: Engine, prompt: PromptSpec) -> PromptSpec:
    """The prompt. Raises AdapterNotHeld where no new request may use its adapter here."""
    if prompt.adapter and not engine.holds_adapter(prompt.adapter):
        raise AdapterNotHeld(prompt.adapter)
    return prompt


def adapter_infos(engine: Engine) -> list[inference_pb2.AdapterInfo]:
    """Returns the adapters for a WorkerInfo."""
    return [inference_pb2.AdapterInfo(**one._asdict()) for one in engine.adapters]
