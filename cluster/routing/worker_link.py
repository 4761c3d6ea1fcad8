"""The gateway's connection to one worker."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc.aio

from tandem.cluster.adapters.values import DIGEST_BYTES
from tandem.cluster.errors import AdapterMissing, PlacementLost, WorkerCallError, WorkerFull
from tandem.cluster.errors.statuses import worker_errors
from tandem.cluster.peers.placed_tokens import PlacedTokens
from tandem.cluster.routing.held_prefixes import HeldPrefixes
from tandem.cluster.routing.policy import Key, WorkerLoad
from tandem.cluster.routing.prefill_hints import PrefillHints
from tandem.cluster.routing.prompt_logprob_call import PromptLogprobCall
from tandem.cluster.routing.push_times import PushTimes
from tandem.cluster.routing.token_feed import TokenFeed
from tandem.cluster.routing.token_inbox import TokenInbox
from tandem.cluster.routing.worker_watch import WorkerWatch
from tandem.proto import inference_pb2, worker_pb2, worker_pb2_grpc
from tandem.workers.config import Role
from tandem.workers.event_loop import unwatched
from tandem.workers.ports.authentication import authorized
from tandem.workers.ports.tls import SERVER_NAME, Identity
from tandem.workers.wire.messages import NO_SLOT_KEY, QUEUED_KEY, WOULD_PARK_KEY

STATUS_SECONDS = 2.0
AVOID_SECONDS = 1.0  # how long a worker that could not be reached gets no new requests
ABORT_SECONDS = 10.0

Sent = asyncio.Future[worker_pb2.RemoteSendResponse]


@dataclass(frozen=True)
class WorkerAddress:
    """One worker's address. The launcher tells the gateway; no request can."""

    role: Role
    pe: int
    address: str
    token: str = field(repr=False)
    identity: Identity | None = field(default=None, repr=False)  # for mutual TLS; None if loopback is enough
    epoch: int = 0  # its own, if it has replaced another worker of its island; 0: the island's


class WorkerLink:
    """Calls one worker in its own epoch. Calls raise WorkerCallErrors; a lost worker is unreachable for a moment."""

    def __init__(
        self,
        worker: WorkerAddress,
        island: str,
        epoch: int,
        max_message_bytes: int,
        prefixes: HeldPrefixes[Key],
        placed: PlacedTokens,
        pushes: PushTimes,
    ) -> None:
        """prefixes: learns what the worker holds, from watch() on. pushes: learns how long pushes take."""
        self.key: Key = (island, worker.pe)
        options = [
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            ("grpc.enable_http_proxy", 0),
            ("grpc.max_reconnect_backoff_ms", 1000),
        ]
        self.worker = worker
        self.role, self.pe, self.epoch = worker.role, worker.pe, (epoch := worker.epoch or epoch)
        self.placed = placed
        self._report = worker_pb2.WorkerReport()
        self.known_load: WorkerLoad | None = None  # of worker_load(), until any of its figures changes
        self._prompts: dict[str, int] = {}  # tokens of requests whose first token the worker has yet to give
        self.decoding = 0  # requests of this gateway process that the worker holds, to decode them
        self._address, self._host = worker.address, worker.address.rpartition(":")[0]
        self._pushes = pushes
        self.adapters: frozenset[bytes] = frozenset()  # digests of LoRA adapters that its requests may use
        self.resident_adapters: frozenset[bytes] = frozenset()  # of these: on its device
        self._name = f"{worker.role} worker (PE {worker.pe}, epoch {epoch})"
        self._channel = _channel(worker, options)
        self._stub = authorized(worker_pb2_grpc.WorkerStub(self._channel), worker.token)
        self._avoid_until = 0.0
        self.hints = PrefillHints(self._stub)
        self.feed = TokenFeed(self._stub, epoch, self._lost)
        self._prefixes = prefixes
        self._watch = WorkerWatch(self._stub, epoch, self._take_report, self._lose_reports)

    def watch(self) -> None:
        """Takes in the worker's reports from now on, until close()."""
        self._watch.start()

    def end_watch(self) -> None:
        """Stops taking in reports; earlier ones are void. Idempotent."""
        self._watch.end()

    @property
    def report(self) -> worker_pb2.WorkerReport:
        """The worker's latest figures."""
        return self._report

    @report.setter
    def report(self, report: worker_pb2.WorkerReport) -> None:
        before, self._report, self.known_load = self._report, report, None
        if (report.adapters, report.resident_adapters) != (before.adapters, before.resident_adapters):
            self.adapters = _digests(report.adapters)
            self.resident_adapters = _digests(report.resident_adapters)

    @property
    def name(self) -> str:
        """The worker's name in errors."""
        return f"{self._name} of island {self.key[0]}"

    @property
    def load(self) -> int:
        """The number of tokens that this gateway process has placed on the worker and not yet taken back."""
        return self.placed.tokens.own

    @load.setter
    def load(self, tokens: int) -> None:
        self.placed.tokens.add(tokens - self.placed.tokens.own)

    @property
    def reachable(self) -> bool:
        """False for a moment after a call has failed, which is sooner than the supervisor tells."""
        return time.monotonic() >= self._avoid_until

    @property
    def has_prompts(self) -> bool:
        """True if this gateway process awaits a first token from the worker."""
        return bool(self._prompts)

    @property
    def unfinished(self) -> int:
        """The number of this gateway process's requests that still need the worker."""
        return self.decoding + len(self._prompts)

    def expect_prompt(self, request_id: str, num_tokens: int) -> None:
        """Counts a prompt that the worker is to compute."""
        self.forget_prompt(request_id)
        self._prompts[request_id] = num_tokens
        self.placed.prompts.add(num_tokens)

    def forget_prompt(self, request_id: str) -> None:
        """Stops counting the prompt: its first token is there, or will not come. Idempotent."""
        self.placed.prompts.add(-self._prompts.pop(request_id, 0))

    def pushed_to(self, decode: "WorkerLink", tokens: int, seconds: float) -> None:
        """Records that pushing so many tokens to that worker made a prompt take so much longer."""
        self._pushes.saw((self._host, decode._host), tokens, seconds)

    def worker_load(self) -> WorkerLoad:
        """Returns the load that routing policies see, over all the gateway's processes. The newest prompts are not in
        the report yet.

        Becomes known_load, unless the worker is avoided: no event marks the end of that.
        """
        report, reachable = self._report, self.reachable
        load = WorkerLoad(
            island=self.key[0],
            pe=self.pe,
            role=self.role,
            load=self.placed.tokens.of_all,
            reachable=reachable,
            prompt_tokens=max(self.placed.prompts.of_all, report.prompt_tokens),
            rows=report.rows,
            parked=report.parked,
            token_seconds=report.token_seconds,
            prompt_rate=report.prompt_tokens_per_second,
            prompt_rate_beside_rows=report.prompt_tokens_per_second_beside_rows,
            host=self._host,
        )
        self.known_load = load if reachable else None
        return load

    def avoid(self) -> None:
        """Gives the worker no new requests for a moment."""
        self._avoid_until = time.monotonic() + AVOID_SECONDS
        self.known_load = None

    async def prepare(self, request: worker_pb2.PrepareReceiveRequest, timeout: float) -> worker_pb2.Reservation:
        with worker_errors(self._name):
            return await self._stub.PrepareReceive(request, timeout=timeout)

    def send(self, request: worker_pb2.RemoteSendRequest, timeout: float) -> Sent:
        """Starts RemoteSend before it returns. Cancelling the future ends the call."""
        with self._errors():
            call = self._stub.RemoteSend(request, timeout=timeout)

        async def answer() -> worker_pb2.RemoteSendResponse:
            try:
                with self._errors():
                    return await call
            except AdapterMissing:
                self.lacks_adapter(request.prompt.adapter)
                raise

        return unwatched(asyncio.ensure_future(answer()))

    def generate(
        self, request: worker_pb2.StartGenerateRequest, inbox: TokenInbox, timeout: float
    ) -> asyncio.Future[None]:
        """Starts StartGenerate before it returns; messages and failure go to the inbox. Cancelling ends the call."""
        with self._errors():
            call = self._stub.StartGenerate(request, timeout=timeout)

        async def read() -> None:
            try:
                with self._errors():
                    await inbox.read(call)
                inbox.end(PlacementLost(f"the gRPC stream of {self._name} ended before the request did"))
            except WorkerCallError as error:
                inbox.end(error)

        reading = asyncio.ensure_future(read())
        reading.add_done_callback(lambda _: call.cancel())
        return reading

    async def read_prompts(
        self, request: worker_pb2.ReadPromptsRequest, timeout: float
    ) -> worker_pb2.ReadPromptsResponse:
        """Calls ReadPrompts. Cancelling ends the call, and the worker's computation for it."""
        with self._errors():
            return await self._stub.ReadPrompts(request, timeout=timeout)

    async def prompt_logprobs(self, request_id: str, timeout: float) -> PromptLogprobCall:
        """Opens the call for the log-probabilities of a prompt that the worker is to compute. It comes before the
        request's other calls."""
        request = worker_pb2.PromptLogprobsRequest(request_id=request_id, epoch=self.epoch)
        with self._errors():
            call = PromptLogprobCall(self._stub.PromptLogprobs(request, timeout=timeout), self._errors)
        await call.opened()
        return call

    async def abort(self, request_id: str, writer_quiet: bool = False) -> bool:
        """Aborts a request. True when the worker has answered that it neither computes nor writes for the request any
        more."""
        request = worker_pb2.AbortRequest(request_id=request_id, epoch=self.epoch, writer_quiet=writer_quiet)
        try:
            with worker_errors(self._name):
                await self._stub.Abort(request, timeout=ABORT_SECONDS)
        except WorkerCallError:
            return False
        return True

    async def load_adapter(self, name: str, path: str, digest: bytes, timeout: float) -> worker_pb2.LoadedAdapter:
        """Makes the worker load an adapter; see Worker.LoadAdapter. digest: empty for any."""
        request = worker_pb2.LoadAdapterRequest(epoch=self.epoch, name=name, path=path, digest=digest)
        with worker_errors(self._name):
            answer = await self._stub.LoadAdapter(request, timeout=timeout)
        self.adapters |= {answer.digest}  # its next report says so, too
        return answer

    async def remove_adapter(self, digest: bytes, timeout: float) -> None:
        """Makes the worker refuse new requests for the adapter."""
        self.adapters -= {digest}
        with worker_errors(self._name):
            await self._stub.RemoveAdapter(
                worker_pb2.RemoveAdapterRequest(epoch=self.epoch, digest=digest), timeout=timeout
            )

    def lacks_adapter(self, digest: bytes) -> None:
        """Notes that the worker has reported the adapter missing."""
        self.adapters -= {digest}

    async def status(self) -> inference_pb2.WorkerInfo:
        """Returns the worker's own account. `alive` is false when it does not answer in time."""
        try:
            with worker_errors(self._name):
                info = await self._stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=STATUS_SECONDS)
        except WorkerCallError:
            role = inference_pb2.ROLE_PREFILL if self.role == Role.PREFILL else inference_pb2.ROLE_DECODE
            info = inference_pb2.WorkerInfo(role=role, pe=self.pe, alive=False)
        info.address = self._address
        return info

    async def close(self) -> None:
        """Closes the connection. Calls under way fail."""
        await self._watch.close()
        await self.hints.close()
        await self.feed.close()
        await self._channel.close()

    def _take_report(self, report: worker_pb2.WorkerReport) -> None:
        self.report = report
        self._prefixes.apply(self.key, report)

    def _lose_reports(self) -> None:
        self.report = worker_pb2.WorkerReport()
        self._prefixes.drop(self.key)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            with worker_errors(self._name):
                yield
        except PlacementLost:
            self.avoid()
            raise

    def _lost(self) -> PlacementLost:
        """Makes the error of requests whose tokens were lost with the feed."""
        self.avoid()
        return PlacementLost(f"the feed of {self._name} ended before the request did")


def _digests(packed: bytes) -> frozenset[bytes]:
    return frozenset(packed[begin : begin + DIGEST_BYTES] for begin in range(0, len(packed), DIGEST_BYTES))


def _channel(worker: WorkerAddress, options: list[tuple[str, int]]) -> grpc.aio.Channel:
    if worker.identity is None:
        # Its next epoch may have the same socket: without a pool of its own, gRPC would wait a second to try it again.
        alone = [*options, ("grpc.use_local_subchannel_pool", 1)]
        return grpc.aio.insecure_channel(worker.address, options=alone)
    named = [*options, ("grpc.ssl_target_name_override", SERVER_NAME)]
    return grpc.aio.secure_channel(worker.address, worker.identity.channel_credentials(), options=named)


def would_park(refused: WorkerFull) -> bool:
    """Returns whether running requests would have been parked for the refused request, if the call allowed it."""
    return _says(refused, WOULD_PARK_KEY)


def lacks_slot(refused: WorkerFull) -> bool:
    """Returns whether the request found no slot for its adapter. Others may have room."""
    return _says(refused, NO_SLOT_KEY)


def had_prompts(failed: WorkerCallError) -> bool:
    """Returns whether the worker of a failed ReadPrompts may have computed something: it had queued the prompts, or its
    connection was closed during the call."""
    cause = failed.__cause__
    if isinstance(cause, grpc.aio.AioRpcError):
        return any(key == QUEUED_KEY for key, _ in cause.initial_metadata() or ())
    return isinstance(cause, asyncio.CancelledError)


def _says(refused: WorkerFull, wanted: str) -> bool:
    cause = refused.__cause__
    said = cause.trailing_metadata() if isinstance(cause, grpc.aio.AioRpcError) else ()
    return any(key == wanted for key, _ in said or ())
