"""A worker that answers as a test tells it, for tests of the gateway when workers fail."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from tandem.cluster.routing.membership import IslandState
from tandem.cluster.routing.worker_link import WorkerAddress
from tandem.proto import inference_pb2, worker_pb2, worker_pb2_grpc
from tandem.workers.config import Role
from tandem.workers.requests.feed import Feeds
from tandem.workers.wire.messages import NO_SLOT_KEY, QUEUED_KEY, WOULD_PARK_KEY, prompt_from_bytes

Say = Callable[[list[int]], int]  # the next token after these


@dataclass
class FakeWorker(worker_pb2_grpc.WorkerServicer):
    """Both roles at one address. fails: failures of the next calls, by their names; "queued ReadPrompts" are those that
    come once it has the prompts. The sequence of a request is its prompt, and `say` gives each next token."""

    say: Say
    fails: dict[str, list[str]] = field(default_factory=dict)
    prompts: list[list[int]] = field(default_factory=list)
    announced: dict[str, list[int]] = field(default_factory=dict)
    sent: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    writer_quiet: list[bool] = field(default_factory=list)
    draws_early: bool = False  # whether announced prompts get their first tokens over Announce
    streams: int = 0  # of announcements
    feeds: bool = False  # whether it has Feed
    fed: int = 0  # tokens that went over one
    landed: asyncio.Event | None = None  # what RemoteSend waits for
    room: asyncio.Event | None = None  # what PrepareReceive waits for
    address: str = ""
    step_seconds: float = 0.0
    stop_token: int | None = None  # ends a request, but as its first two tokens
    pe: int | None = None  # of a worker of its own: prompts that it is to write itself it computes itself
    local: list[str] = field(default_factory=list)  # requests with such prompts
    packed: list[worker_pb2.PackedLogprobs] = field(default_factory=list)  # what PromptLogprobs brings
    asked: list[bool] = field(default_factory=list)  # of each RemoteSend: whether it wants them
    priorities: list[int] = field(default_factory=list)  # of each PrepareReceive and each prompt of ReadPrompts
    width: int = 0  # numbers of each prompt that ReadPrompts answers
    parks: list[bool] = field(default_factory=list)  # of each PrepareReceive: whether running requests may be parked
    adapters: dict[str, bytes] = field(default_factory=dict)  # digests of the folders that it can load, by their paths
    held: set[bytes] = field(default_factory=set)
    slotless: set[bytes] = field(default_factory=set)  # of those held, without a slot on its device
    refused: list[bytes] = field(default_factory=list)  # the adapters of requests that found no slot
    computed: list[tuple[bytes, bytes]] = field(default_factory=list)  # adapter and salt of each RemoteSend
    targets: list[float | None] = field(default_factory=list)  # of each RemoteSend: what is left for its first token

    async def start(self) -> None:
        self._prepared: dict[str, tuple[list[int], int]] = {}
        self.open_feeds = Feeds()
        self._server = grpc.aio.server()
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(0)

    def state(self, name: str, epoch: int, version: int) -> IslandState:
        workers = tuple(
            WorkerAddress(role, pe, self.address, "") for pe, role in enumerate((Role.PREFILL, Role.DECODE))
        )
        return IslandState(name, epoch, restarts=epoch - 1, workers=workers, version=version)

    async def PrepareReceive(self, request: worker_pb2.PrepareReceiveRequest, context: Any) -> worker_pb2.Reservation:
        self.priorities.append(request.prompt.priority)
        self.parks.append(request.parks)
        await self._maybe_fail("PrepareReceive", context)
        if request.prompt.adapter and request.prompt.adapter not in self.held:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"adapter {request.prompt.adapter.hex()} is not held here")
        if request.prompt.adapter in self.slotless:
            self.refused.append(request.prompt.adapter)
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no slot", ((NO_SLOT_KEY, "1"),))
        if self.room is not None:
            await self.room.wait()
        if request.writer_pe == self.pe:
            self.local.append(request.request_id)
        self._prepared[request.request_id] = (prompt_from_bytes(request.prompt.token_ids).tolist(), request.max_tokens)
        return worker_pb2.Reservation(reservation_id=1, epoch=request.epoch, pages=1)

    async def Announce(
        self, request_iterator: AsyncIterator[worker_pb2.AnnounceRequest], context: Any
    ) -> AsyncIterator[worker_pb2.FirstToken]:
        self.streams += 1
        async for request in request_iterator:
            self.announced[request.request_id] = prompt = prompt_from_bytes(request.prompt.token_ids).tolist()
            await self._maybe_fail("Announce", context)
            if self.draws_early:
                yield worker_pb2.FirstToken(request_id=request.request_id, token_id=self.say(prompt))

    async def RemoteSend(self, request: worker_pb2.RemoteSendRequest, context: Any) -> worker_pb2.RemoteSendResponse:
        self.sent.append(request.request_id)
        self.asked.append(request.sampling.HasField("prompt_logprobs"))
        has_target = request.sampling.HasField("first_token_seconds")
        self.targets.append(request.sampling.first_token_seconds if has_target else None)
        self.prompts.append(prompt_from_bytes(request.prompt.token_ids).tolist())
        self.computed.append((request.prompt.adapter, request.prompt.salt))
        if self.landed is not None:
            await self.landed.wait()
        await self._maybe_fail("RemoteSend", context)
        return worker_pb2.RemoteSendResponse(first_token=self.say(self.prompts[-1]), prefill_seconds=1.0)

    async def ReadPrompts(self, request: worker_pb2.ReadPromptsRequest, context: Any) -> worker_pb2.ReadPromptsResponse:
        self.priorities += [one.priority for one in request.prompts]
        await self._maybe_fail("ReadPrompts", context)
        await context.send_initial_metadata(((QUEUED_KEY, "1"),))
        await self._maybe_fail("queued ReadPrompts", context)
        count, width = len(request.prompts), len(request.token_ids) or self.width
        return worker_pb2.ReadPromptsResponse(
            values=bytes(4 * count * width), cached_tokens=[0] * count, host_cached_tokens=[0] * count
        )

    async def StartGenerate(
        self, request: worker_pb2.StartGenerateRequest, context: Any
    ) -> AsyncIterator[worker_pb2.GeneratedTokens]:
        sequence, max_tokens = self._prepared[request.request_id]
        fed, local = 0, request.request_id in self.local
        if local:
            self.prompts.append(sequence)
        else:
            sequence = [*sequence, self.say(sequence)]
        feed = self.open_feeds.get(request.feed)
        for _ in range(max_tokens - 1 if local else max_tokens - 2):
            await self._maybe_fail("StartGenerate", context)
            await asyncio.sleep(self.step_seconds)
            sequence.append(self.say(sequence))
            if sequence[-1] == self.stop_token:
                stop: Any = 1
                yield worker_pb2.GeneratedTokens(token_ids=sequence[-1:], finish_reason=stop, fed=fed)
                return
            if feed is None:
                yield worker_pb2.GeneratedTokens(token_ids=sequence[-1:])
            else:
                feed.add(request.number, sequence[-1:])
                fed, self.fed = fed + 1, self.fed + 1
        last = [self.say(sequence)] if local or max_tokens > 1 else []
        prefilled = worker_pb2.Prefilled(prefill_seconds=1.0) if local else None
        length: Any = 2
        yield worker_pb2.GeneratedTokens(token_ids=last, finish_reason=length, fed=fed, prefilled=prefilled)

    async def PromptLogprobs(
        self, request: worker_pb2.PromptLogprobsRequest, context: Any
    ) -> AsyncIterator[worker_pb2.PackedLogprobs]:
        """The failure "none" ends it without a message."""
        await context.send_initial_metadata(())
        if self.fails.get("PromptLogprobs", [])[:1] == ["none"]:
            self.fails["PromptLogprobs"].pop(0)
            return
        for packed in self.packed:
            await self._maybe_fail("PromptLogprobs", context)
            yield packed

    async def Feed(self, request: worker_pb2.FeedRequest, context: Any) -> AsyncIterator[worker_pb2.FedTokens]:
        if not self.feeds:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "as workers had none")
        with self.open_feeds.opened(request.feed) as feed:
            assert feed is not None, "each call has a number of its own"
            await context.send_initial_metadata(())
            async for message in feed.messages():
                await self._maybe_fail("Feed", context)
                yield message

    async def LoadAdapter(self, request: worker_pb2.LoadAdapterRequest, context: Any) -> worker_pb2.LoadedAdapter:
        await self._maybe_fail("LoadAdapter", context)
        digest = self.adapters.get(request.path)
        if digest is None or request.digest not in (b"", digest):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"path is {request.path}; it holds no such adapter")
            raise AssertionError("abort() raises")
        self.held.add(digest)
        return worker_pb2.LoadedAdapter(digest=digest, rank=8, bytes=1 << 20)

    async def RemoveAdapter(
        self, request: worker_pb2.RemoveAdapterRequest, context: Any
    ) -> worker_pb2.RemoveAdapterResponse:
        await self._maybe_fail("RemoveAdapter", context)
        known = request.digest in self.held
        self.held.discard(request.digest)
        return worker_pb2.RemoveAdapterResponse(known=known)

    async def GetStatus(self, request: worker_pb2.GetStatusRequest, context: Any) -> inference_pb2.WorkerInfo:
        """Half of its pages are free. Both of its roles answer as a decode worker."""
        await self._maybe_fail("GetStatus", context)
        return inference_pb2.WorkerInfo(
            role=inference_pb2.ROLE_DECODE, alive=True, num_pages=64, free_pages=32, gpu_bytes_of_others=7
        )

    async def Watch(self, request: worker_pb2.WatchRequest, context: Any) -> AsyncIterator[worker_pb2.WorkerReport]:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "as workers had none")
        yield worker_pb2.WorkerReport()

    async def Abort(self, request: worker_pb2.AbortRequest, context: Any) -> worker_pb2.AbortResponse:
        self.ended.append(request.request_id)
        self.writer_quiet.append(request.writer_quiet)
        await self._maybe_fail("Abort", context)
        return worker_pb2.AbortResponse(known=True)

    async def _maybe_fail(self, call: str, context: Any) -> None:
        todo = self.fails.get(call)
        if not todo:
            return
        status = todo.pop(0)
        if status == "hang":
            await asyncio.sleep(60)
        if status == "would park":
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "as the test says", ((WOULD_PARK_KEY, "1"),))
        if status != "go on":
            await context.abort(grpc.StatusCode[status], "as the test says")
