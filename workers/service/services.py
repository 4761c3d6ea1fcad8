"""The gRPC service of one worker: handlers post to the step thread and wait for its answer."""

import asyncio
import logging
import os
from collections.abc import AsyncIterable, Callable
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Generic, NoReturn, TypeVar

import grpc
import grpc.aio

from tandem.cache.paged_cache import PagedKVCache
from tandem.cache.plan.errors import CacheError
from tandem.proto import inference_pb2, worker_pb2, worker_pb2_grpc
from tandem.transfer.errors import TransferError
from tandem.workers.config import Role, WorkerConfig
from tandem.workers.decode.feed import Feeds
from tandem.workers.decode.loop import DecodeLoop
from tandem.workers.decode.token_stream import Tokens, TokenStream
from tandem.workers.errors import (
    Aborted,
    CorruptKV,
    ForwardFailed,
    InvalidCall,
    LeaseExpired,
    NoRoom,
    Stale,
    StaleEpoch,
    WriterNotQuiet,
)
from tandem.workers.event_loop import unwatched
from tandem.workers.prefill.first_token import FirstTokens
from tandem.workers.prefill.loop import PrefillLoop
from tandem.workers.prefill.request import PrefillResult
from tandem.workers.sampling.finish import FinishReason
from tandem.workers.service.call_checks import check_length, check_prompt, check_request_id, check_sampling
from tandem.workers.step_thread import StepThread
from tandem.workers.wire.lease import Lease
from tandem.workers.wire.messages import logprobs_to_proto, reservation_from_proto, reservation_to_proto
from tandem.workers.wire.reservation import Reservation

T = TypeVar("T")
LoopT = TypeVar("LoopT", PrefillLoop, DecodeLoop)
Context = grpc.aio.ServicerContext
log = logging.getLogger(__name__)

STATUS_OF_ERROR: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
    (NoRoom, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (Stale, grpc.StatusCode.FAILED_PRECONDITION),
    (Aborted, grpc.StatusCode.ABORTED),
    (LeaseExpired, grpc.StatusCode.ABORTED),
    (CorruptKV, grpc.StatusCode.DATA_LOSS),
    (InvalidCall, grpc.StatusCode.INVALID_ARGUMENT),
    (ForwardFailed, grpc.StatusCode.INTERNAL),
    (WriterNotQuiet, grpc.StatusCode.UNAVAILABLE),
    (CacheError, grpc.StatusCode.INVALID_ARGUMENT),
    (TransferError, grpc.StatusCode.INVALID_ARGUMENT),
)


async def _refuse(context: Context, error: Exception) -> NoReturn:
    for kind, status in STATUS_OF_ERROR:
        if isinstance(error, kind):
            await context.abort(status, str(error))
    log.exception("a call failed", exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}")


async def _outcome(context: Context, future: "Future[T]") -> T:
    """What the step thread will put there. The caller's cancellation must not cancel it: others may wait for it too."""
    try:
        return await asyncio.shield(unwatched(asyncio.wrap_future(future)))
    except Exception as error:
        await _refuse(context, error)


class WorkerService(worker_pb2_grpc.WorkerServicer, Generic[LoopT]):
    """What every worker answers. A role that a worker does not have answers UNIMPLEMENTED, as generated."""

    def __init__(
        self,
        config: WorkerConfig,
        vocab_size: int,
        thread: StepThread,
        loop: LoopT,
        cache: PagedKVCache,
    ) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._thread = thread
        self._loop = loop
        self._cache = cache

    async def _on_step_thread(self, context: Context, epoch: int, command: Callable[[], T]) -> T:
        def of_this_epoch() -> T:
            if epoch != self._config.epoch:
                self._loop.counters.stale_calls += 1
                raise StaleEpoch(epoch, self._config.epoch)
            return command()

        try:
            return await asyncio.wrap_future(self._thread.call(of_this_epoch))
        except Exception as error:
            await _refuse(context, error)

    async def GetStatus(self, request: worker_pb2.GetStatusRequest, context: Context) -> inference_pb2.WorkerInfo:
        return await self._on_step_thread(context, self._config.epoch, self._status)

    def _status(self) -> inference_pb2.WorkerInfo:
        cache, config = self._cache, self._config
        return inference_pb2.WorkerInfo(
            role=inference_pb2.ROLE_PREFILL if config.role == Role.PREFILL else inference_pb2.ROLE_DECODE,
            pe=config.pe,
            pid=os.getpid(),
            alive=True,
            num_pages=cache.num_pages,
            free_pages=cache.num_free_pages,
            cached_pages=cache.num_cached_pages,
            draining_pages=cache.num_draining_pages,
            running=self._loop.num_running,
            waiting=self._loop.num_waiting,
            resident_bytes=_resident_bytes(),
            counters=inference_pb2.WorkerCounters(**asdict(self._loop.counters)),
        )


class PrefillService(WorkerService[PrefillLoop]):
    """Announce, RemoteSend and Abort."""

    async def Announce(self, request_iterator: AsyncIterable[worker_pb2.AnnounceRequest], context: Context) -> None:
        drawn = FirstTokens(asyncio.get_running_loop())

        def announce(request: worker_pb2.AnnounceRequest) -> None:
            check_request_id(request.request_id)
            prompt = check_prompt(request.prompt, self._vocab_size)
            check_length(len(prompt), 1, self._config.max_model_len)
            future = self._loop.announce(request.request_id, prompt)
            if future is not None:
                drawn.expect(request.request_id, future)

        await context.send_initial_metadata(())  # now, while nobody waits for it
        writing = unwatched(asyncio.ensure_future(_write_all(context, drawn)))
        try:
            async for request in request_iterator:
                await self._on_step_thread(context, request.epoch, partial(announce, request))
        finally:
            writing.cancel()

    async def RemoteSend(
        self, request: worker_pb2.RemoteSendRequest, context: Context
    ) -> worker_pb2.RemoteSendResponse:
        attended: list[Lease] = []

        def submit() -> Future[PrefillResult]:
            check_request_id(request.request_id)
            prompt = check_prompt(request.prompt, self._vocab_size)
            check_length(len(prompt), 1, self._config.max_model_len)
            params = check_sampling(request.sampling, self._vocab_size)
            reservation = reservation_from_proto(request.reservation, self._config.token)
            future = self._loop.submit(request.request_id, prompt, params, reservation)
            lease = self._loop.attend(request.request_id)
            attended.extend([] if lease is None else [lease])
            return future

        try:
            result = await _outcome(context, await self._on_step_thread(context, request.epoch, submit))
        except asyncio.CancelledError:
            self._thread.call(lambda: [lease.leave() for lease in attended])  # runs behind submit, if that runs at all
            raise
        return worker_pb2.RemoteSendResponse(
            first_token=result.first_token,
            logprobs=None if result.logprobs is None else logprobs_to_proto(result.logprobs),
            cached_tokens=result.cached_tokens,
            queue_seconds=result.queue_seconds,
            prefill_seconds=result.prefill_seconds,
            push_seconds=result.push_seconds,
            bytes_pushed=result.bytes_pushed,
        )

    async def Abort(self, request: worker_pb2.AbortRequest, context: Context) -> worker_pb2.AbortResponse:
        def abort() -> Future[bool]:
            check_request_id(request.request_id)
            return self._loop.abort(request.request_id)

        future = await self._on_step_thread(context, request.epoch, abort)
        return worker_pb2.AbortResponse(known=await _outcome(context, future))


class DecodeService(WorkerService[DecodeLoop]):
    """PrepareReceive, StartGenerate, Feed and Abort."""

    def __init__(
        self, config: WorkerConfig, vocab_size: int, thread: StepThread, loop: DecodeLoop, cache: PagedKVCache
    ) -> None:
        super().__init__(config, vocab_size, thread, loop, cache)
        self._feeds = Feeds()

    async def PrepareReceive(
        self, request: worker_pb2.PrepareReceiveRequest, context: Context
    ) -> worker_pb2.Reservation:
        def prepare() -> Reservation:
            check_request_id(request.request_id)
            prompt = check_prompt(request.prompt, self._vocab_size)
            check_length(len(prompt), request.max_tokens, self._config.max_model_len)
            return self._loop.prepare(request.request_id, prompt, request.max_tokens, request.writer_pe)

        reservation = await self._on_step_thread(context, request.epoch, prepare)
        return reservation_to_proto(reservation, self._config.token)

    async def StartGenerate(self, request: worker_pb2.StartGenerateRequest, context: Context) -> None:
        feed = None if request.sampling.HasField("logprobs") else self._feeds.get(request.feed)
        stream = TokenStream(feed, request.number)
        started: list[str] = []

        def start() -> None:
            check_request_id(request.request_id)
            params = check_sampling(request.sampling, self._vocab_size)
            self._loop.start(request.request_id, request.reservation_id, params, stream)
            started.append(request.request_id)

        finished = False
        try:
            await self._on_step_thread(context, request.epoch, start)
            while not finished:
                tokens = await stream.next()
                finished = tokens.finish_reason != FinishReason.RUNNING
                if tokens.error is not None:
                    await _refuse(context, tokens.error)
                await context.write(_generated(tokens))
        finally:
            if not finished:  # the reader went away; a start that is still to come is not one of a reader
                self._thread.call(lambda: [self._loop.abort(started_id, False) for started_id in started])

    async def Feed(self, request: worker_pb2.FeedRequest, context: Context) -> None:
        def check() -> None:
            if not request.feed:
                raise InvalidCall("feed is 0; any other number is accepted")

        await self._on_step_thread(context, request.epoch, check)
        with self._feeds.opened(request.feed) as feed:
            if feed is None:
                await context.abort(grpc.StatusCode.ALREADY_EXISTS, f"feed {request.feed} is open")
            await context.send_initial_metadata(())
            async for message in feed.messages():
                await context.write(message)

    async def Abort(self, request: worker_pb2.AbortRequest, context: Context) -> worker_pb2.AbortResponse:
        def abort() -> bool:
            check_request_id(request.request_id)
            return self._loop.abort(request.request_id, request.writer_quiet)

        known = await self._on_step_thread(context, request.epoch, abort)
        return worker_pb2.AbortResponse(known=known)


async def _write_all(context: Context, drawn: FirstTokens) -> None:
    while True:
        request_id, first = await drawn.next()
        logprobs = None if first.logprobs is None else logprobs_to_proto(first.logprobs)
        await context.write(worker_pb2.FirstToken(request_id=request_id, token_id=first.token_id, logprobs=logprobs))


def _resident_bytes() -> int:
    """Memory of this process, as Linux counts it."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _generated(tokens: Tokens) -> worker_pb2.GeneratedTokens:
    return worker_pb2.GeneratedTokens(
        token_ids=tokens.token_ids,
        logprobs=[logprobs_to_proto(entry) for entry in tokens.logprobs],
        finish_reason=int(tokens.finish_reason),  # type: ignore[arg-type]  # same numbers as the enum of the message
        fed=tokens.fed,
    )
