"""The gRPC service of one worker: handlers post to the step thread and wait for its answer."""

import asyncio
import os
import time
from collections.abc import AsyncIterable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from tandem.cache.operations.holdings import PageCounts
from tandem.proto import inference_pb2, worker_pb2, worker_pb2_grpc
from tandem.workers.config import Role, WorkerConfig
from tandem.workers.engine.rank_progress import stalled_ranks
from tandem.workers.errors import InvalidCall, NoRoom, StaleEpoch, WorkerError
from tandem.workers.event_loop import unwatched
from tandem.workers.prefill.prompt_readers import ReadCall, ReadPrompts
from tandem.workers.requests.feed import Feeds
from tandem.workers.requests.first_token import FirstTokens
from tandem.workers.requests.prefill_request import PrefillResult
from tandem.workers.requests.prompt_logprob_streams import PromptLogprobStream, PromptLogprobStreams, gatherer
from tandem.workers.requests.token_stream import Tokens, TokenStream
from tandem.workers.sampling.finish import FinishReason
from tandem.workers.sampling.guided import Constraint, Grammars, InvalidGuide
from tandem.workers.service.adapter_calls import AdapterLoads, adapter_infos, check_held
from tandem.workers.service.call_checks import PromptCheck, check_request_id, check_sampling
from tandem.workers.service.gpu_memory import GpuMemory
from tandem.workers.service.rank_infos import rank_infos
from tandem.workers.service.read_prompts import read_call, to_message
from tandem.workers.service.reports import Reports
from tandem.workers.service.resident import resident_bytes
from tandem.workers.service.status import call_of, outcome, queued, refuse
from tandem.workers.steps.step_loop import StepLoop
from tandem.workers.steps.step_thread import StepThread
from tandem.workers.wire.lease import Lease
from tandem.workers.wire.messages import (
    logprobs_to_proto,
    reservation_from_proto,
    reservation_to_proto,
)
from tandem.workers.wire.prompt_spec import MOST_READ, PromptSpec
from tandem.workers.wire.reservation import Reservation

T = TypeVar("T")
Context = grpc.aio.ServicerContext
ROOM_SECONDS = 2.0  # for running requests to give room up
LIFT_SECONDS = 2.0  # for pages to come from a disk; then their tokens are computed
STALLED_SECONDS = 1.5  # until a worker of several ranks says whom it waits for; its router waits little longer


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Every call to a worker, whatever it is mainly for."""

    def __init__(
        self,
        config: WorkerConfig,
        vocab_size: int,
        thread: StepThread,
        loop: StepLoop,
        grammars: Grammars,
        gpu_memory: GpuMemory,
        max_encoder_tokens: int = 0,
    ) -> None:
        self._config, self._gpu_memory = config, gpu_memory
        self._vocab_size = vocab_size
        self._prompt = PromptCheck(vocab_size, config.max_model_len, max_encoder_tokens, config.page_size)
        self._thread = thread
        self._loop = loop
        self._feeds = Feeds()
        self._prompt_logprobs = PromptLogprobStreams()
        self._grammars = grammars
        self._adapters = AdapterLoads(loop.engine, config.adapters, thread.call)

    async def _on_step_thread(self, context: Context, epoch: int, command: Callable[[], T]) -> T:
        def of_this_epoch() -> T:
            if epoch != self._config.epoch:
                self._loop.counters.stale_calls += 1
                raise StaleEpoch(epoch, self._config.epoch)
            return command()

        try:
            return await asyncio.wrap_future(self._thread.call(of_this_epoch))
        except Exception as error:
            await refuse(context, error)

    async def GetStatus(self, request: worker_pb2.GetStatusRequest, context: Context) -> inference_pb2.WorkerInfo:
        answer = self._on_step_thread(context, self._config.epoch, self._status)
        if not (before := self._loop.engine.ranks):
            return await answer
        try:
            return await asyncio.wait_for(answer, STALLED_SECONDS)
        except TimeoutError:
            after = self._loop.engine.ranks or before
            info = self._named
            info.ranks.extend(rank_infos(after, stalled_ranks(before, after)))
            return info

    @property
    def _named(self) -> inference_pb2.WorkerInfo:
        """The worker's identity, without its state."""
        role = inference_pb2.ROLE_PREFILL if self._config.role == Role.PREFILL else inference_pb2.ROLE_DECODE
        return inference_pb2.WorkerInfo(role=role, pe=self._config.pe, pid=os.getpid())

    def _status(self) -> inference_pb2.WorkerInfo:
        pages, loop, meter = self._loop.engine.pages, self._loop, self._loop.meter
        info = self._named
        info.MergeFrom(
            inference_pb2.WorkerInfo(
                alive=True,
                num_pages=pages.total,
                free_pages=pages.free,
                cached_pages=pages.cached,
                draining_pages=pages.draining,
                **_of_the_same_names(pages, inference_pb2.WorkerInfo),
                running=loop.num_running,
                waiting=loop.num_waiting,
                resident_bytes=resident_bytes(),
                gpu_bytes_of_others=self._gpu_memory.bytes_of_others(),
                counters=inference_pb2.WorkerCounters(
                    prompt_tokens=loop.prefills.computed_tokens,
                    decoded_tokens=loop.decodes.decoded_tokens,
                    **_of_the_same_names(pages, inference_pb2.WorkerCounters),
                    **asdict(loop.counters),
                ),
                token_seconds=meter.token_seconds,
                prompt_tokens_per_second=loop.prompt_rate,
                ranks=rank_infos(loop.engine.ranks),
                adapters=adapter_infos(loop.engine),
            )
        )
        return info

    async def Abort(self, request: worker_pb2.AbortRequest, context: Context) -> worker_pb2.AbortResponse:
        call_of.set(request)

        def abort() -> list[Future[bool]]:
            check_request_id(request.request_id)
            return self._loop.abort(request.request_id, request.writer_quiet)

        answers = await self._on_step_thread(context, request.epoch, abort)
        known = [await outcome(context, answer) for answer in answers]
        return worker_pb2.AbortResponse(known=any(known))

    async def Watch(self, request: worker_pb2.WatchRequest, context: Context) -> None:
        reports = Reports(self._loop)
        while True:
            for report in await self._on_step_thread(context, request.epoch, reports.take):
                await context.write(report)
            await reports.due()

    # Adapters

    async def LoadAdapter(self, request: worker_pb2.LoadAdapterRequest, context: Context) -> worker_pb2.LoadedAdapter:
        try:
            return await self._adapters.load(request, partial(self._on_step_thread, context, request.epoch))
        except WorkerError as error:
            await refuse(context, error)

    async def RemoveAdapter(
        self, request: worker_pb2.RemoveAdapterRequest, context: Context
    ) -> worker_pb2.RemoveAdapterResponse:
        try:
            return await self._adapters.remove(request, partial(self._on_step_thread, context, request.epoch))
        except InvalidCall as error:
            await refuse(context, error)

    async def _constraint(self, context: Context, sampling: inference_pb2.SamplingParams) -> Constraint | None:
        """Compiles the guide outside the step thread; None for a request without."""
        if not sampling.HasField("guided"):
            return None
        try:
            guided = check_sampling(sampling, self._vocab_size).guided
            return None if guided is None else await asyncio.to_thread(self._grammars.constraint, guided)
        except InvalidGuide as error:
            await refuse(context, InvalidCall(f"sampling.guided: {error}"))
        except InvalidCall as error:
            await refuse(context, error)

    async def _lift(self, context: Context, epoch: int, prompts: Callable[[], Sequence[PromptSpec]]) -> None:
        """Returns once the pages are in host memory that a disk has of prompts' beginnings; see Lifts."""
        if not self._loop.has_disk:
            return
        begin = self._loop.lifts.begin
        lifted = await self._on_step_thread(context, epoch, lambda: [begin(prompt) for prompt in prompts()])
        if coming := [asyncio.wrap_future(one) for one in lifted if one is not None]:
            await asyncio.wait(coming, timeout=LIFT_SECONDS)

    # Prefill

    async def Announce(self, request_iterator: AsyncIterable[worker_pb2.AnnounceRequest], context: Context) -> None:
        prefills = self._loop.prefills
        sampled = FirstTokens(asyncio.get_running_loop())

        def announce(request: worker_pb2.AnnounceRequest) -> None:
            prompt = self._prompt(request)
            if prompt.adapter and not self._loop.engine.holds_adapter(prompt.adapter):
                return  # RemoteSend refuses it; the stream has other prompts, too
            if self._loop.has_disk and self._loop.lifts.begin(prompt) is not None:
                return  # its beginning comes from the disk meanwhile
            future = prefills.speculate(request.request_id, prompt)
            if future is not None:
                sampled.expect(request.request_id, future)

        await context.send_initial_metadata(())  # now, while no prompt waits for it
        writing = unwatched(asyncio.ensure_future(_write_all(context, sampled)))
        try:
            async for request in request_iterator:
                await self._on_step_thread(context, request.epoch, partial(announce, request))
        finally:
            writing.cancel()

    async def RemoteSend(
        self, request: worker_pb2.RemoteSendRequest, context: Context
    ) -> worker_pb2.RemoteSendResponse:
        call_of.set(request)
        wanted = request.sampling.HasField("prompt_logprobs")
        with self._prompt_logprobs.filled(request.request_id, wanted=wanted) as stream:
            return await self._send(request, context, stream)

    async def _send(
        self, request: worker_pb2.RemoteSendRequest, context: Context, stream: PromptLogprobStream | None
    ) -> worker_pb2.RemoteSendResponse:
        prefills = self._loop.prefills
        attended: list[Lease] = []

        def submit() -> Future[PrefillResult]:
            prompt = check_held(self._loop.engine, self._prompt(request))
            params = check_sampling(request.sampling, self._vocab_size)
            reservation = reservation_from_proto(request.reservation, self._config.token)
            scores = gatherer(stream, params)
            future = prefills.submit(request.request_id, prompt, params, reservation, constraint, scores)
            lease = prefills.attend(request.request_id)
            attended.extend([] if lease is None else [lease])
            return future

        constraint = await self._constraint(context, request.sampling)
        if stream is None:
            await self._lift(context, request.epoch, lambda: [self._prompt(request)])
        try:
            result = await outcome(context, await self._on_step_thread(context, request.epoch, submit))
        except asyncio.CancelledError:
            self._thread.call(lambda: [lease.leave() for lease in attended])  # runs after submit, if that runs at all
            raise
        fields = dict(vars(result))  # those of the message
        fields["logprobs"] = None if result.logprobs is None else logprobs_to_proto(result.logprobs)
        return worker_pb2.RemoteSendResponse(**fields)

    async def PromptLogprobs(self, request: worker_pb2.PromptLogprobsRequest, context: Context) -> None:
        call_of.set(request)
        await self._on_step_thread(context, request.epoch, lambda: check_request_id(request.request_id))
        with self._prompt_logprobs.opened(request.request_id) as stream:
            if stream is None:
                await context.abort(grpc.StatusCode.ALREADY_EXISTS, f"request {request.request_id!r} has such a call")
            await context.send_initial_metadata(())
            async for message in stream.messages():
                await context.write(message)

    async def ReadPrompts(
        self, request: worker_pb2.ReadPromptsRequest, context: Context
    ) -> worker_pb2.ReadPromptsResponse:
        call_of.set(request)
        readers, calls = self._loop.prefills.readers, list[ReadCall]()

        def submit() -> Future[ReadPrompts]:
            calls.append(read_call(readers, self._prompt, request))
            return calls[0].result

        if not request.mean:
            await self._lift(context, request.epoch, lambda: [*map(self._prompt.of, request.prompts[:MOST_READ])])
        try:
            return to_message(await queued(context, await self._on_step_thread(context, request.epoch, submit)))
        finally:
            self._thread.call(lambda: [readers.withdraw(call) for call in calls])  # runs after submit

    # Decode

    async def PrepareReceive(
        self, request: worker_pb2.PrepareReceiveRequest, context: Context
    ) -> worker_pb2.Reservation:
        call_of.set(request)
        decodes = self._loop.decodes

        def prepare(*, again: bool = False) -> tuple[Reservation | None, Future[None] | None]:
            prompt = check_held(self._loop.engine, self._prompt(request, request.max_tokens))
            if request.writer_pe != self._config.pe:
                self._loop.check_peer(request.writer_pe)
            writer = request.writer_pe, request.writer_epoch
            if request.fork_of:
                decodes.published.of(request.fork_of)
            parks = request.parks and not again
            try:
                reservation = decodes.prepare(request.request_id, prompt, request.max_tokens, *writer, parks=parks)
            except NoRoom as error:
                if error.coming is None:
                    raise
                return None, error.coming
            return reservation, self._loop.windows_past()

        await self._lift(context, request.epoch, lambda: [self._prompt(request, request.max_tokens)])
        reservation, past = await self._on_step_thread(context, request.epoch, prepare)
        if reservation is None and past is not None:
            await asyncio.wait([asyncio.wrap_future(past)], timeout=ROOM_SECONDS)
            again = partial(prepare, again=True)
            reservation, past = await self._on_step_thread(context, request.epoch, again)
        assert reservation is not None, "the second answer is a reservation, or an error"
        if past is not None:
            await outcome(context, past)
        return reservation_to_proto(reservation, self._config.token)

    async def StartGenerate(self, request: worker_pb2.StartGenerateRequest, context: Context) -> None:
        call_of.set(request)
        wanted = request.sampling.HasField("prompt_logprobs")
        with self._prompt_logprobs.filled(request.request_id, wanted=wanted) as stream:
            await self._generate(request, context, stream)

    async def _generate(
        self, request: worker_pb2.StartGenerateRequest, context: Context, stream: PromptLogprobStream | None
    ) -> None:
        decodes = self._loop.decodes
        feed = None if request.sampling.HasField("logprobs") else self._feeds.get(request.feed)
        token_stream = TokenStream(feed, request.number)
        started: list[str] = []

        def start() -> None:
            check_request_id(request.request_id)
            params = check_sampling(request.sampling, self._vocab_size)
            decodes.start(
                request.request_id,
                request.reservation_id,
                params,
                token_stream,
                request.num_output,
                constraint,
                gatherer(stream, params),
            )
            started.append(request.request_id)

        constraint = await self._constraint(context, request.sampling)
        finished = False
        try:
            await self._on_step_thread(context, request.epoch, start)
            while not finished:
                tokens = await token_stream.next()
                finished = tokens.finish_reason != FinishReason.RUNNING
                if tokens.error is not None:
                    await refuse(context, tokens.error)
                await context.write(_generated(tokens))
        finally:
            if not finished:  # the reader went away; a start that is still to come is not one of a reader
                self._thread.call(lambda: [decodes.abort(started_id, False) for started_id in started])

    async def Feed(self, request: worker_pb2.FeedRequest, context: Context) -> None:
        def check() -> None:
            if not request.feed:
                raise InvalidCall("feed is 0; it must be another number")

        await self._on_step_thread(context, request.epoch, check)
        with self._feeds.opened(request.feed) as feed:
            if feed is None:
                await context.abort(grpc.StatusCode.ALREADY_EXISTS, f"feed {request.feed} is open")
            await context.send_initial_metadata(())
            async for message in feed.messages():
                await context.write(message)


async def _write_all(context: Context, sampled: FirstTokens) -> None:
    while True:
        request_id, first = await sampled.next()
        logprobs = None if first.logprobs is None else logprobs_to_proto(first.logprobs)
        await context.write(worker_pb2.FirstToken(request_id=request_id, token_id=first.token_id, logprobs=logprobs))


def _of_the_same_names(pages: PageCounts, message: type[Message]) -> dict[str, Any]:
    """Returns the counts that a message has fields for, by their names."""
    return {name: count for name, count in pages._asdict().items() if name in message.DESCRIPTOR.fields_by_name}


def _generated(tokens: Tokens) -> worker_pb2.GeneratedTokens:
    ended = tokens.finish_reason != FinishReason.RUNNING
    decoded = None
    if ended:
        decoded = worker_pb2.Decoded(
            began_ns=tokens.began_ns,
            ended_ns=time.time_ns(),
            drafted_tokens=tokens.drafted,
            accepted_tokens=tokens.accepted,
        )
    return worker_pb2.GeneratedTokens(
        decoded=decoded,
        token_ids=tokens.token_ids,
        logprobs=[logprobs_to_proto(entry) for entry in tokens.logprobs],
        finish_reason=int(tokens.finish_reason),  # type: ignore[arg-type]  # same numbers as the enum of the message
        fed=tokens.fed,
        prefilled=None if tokens.prefilled is None else worker_pb2.Prefilled(**asdict(tokens.prefilled)),
    )
