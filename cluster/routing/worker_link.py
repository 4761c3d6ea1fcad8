"""The gateway's connection to one worker."""

import time
from dataclasses import dataclass, field

import grpc
import grpc.aio

from tandem.cluster.routing.prefill_hints import Announcements
from tandem.cluster.routing.token_feed import TokenFeed
from tandem.proto import inference_pb2, worker_pb2, worker_pb2_grpc
from tandem.workers.authentication import authorized
from tandem.workers.config import Role

STATUS_SECONDS = 2.0
WORKER_LOST = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.FAILED_PRECONDITION,  # another epoch
    grpc.StatusCode.UNAUTHENTICATED,  # another process, which got the port of a lost one
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
}
AVOID_SECONDS = 1.0  # how long a worker that could not be reached gets no new requests
ABORT_SECONDS = 10.0


@dataclass(frozen=True)
class WorkerAddress:
    """What the launcher tells the gateway of one worker; membership, never taken from a request."""

    role: Role
    pe: int
    address: str
    token: str = field(repr=False)


@dataclass(eq=False)
class WorkerLink:
    """load counts tokens that this gateway has placed on the worker and not yet taken back. awaited: the requests whose
    first token a prefill worker has yet to give."""

    role: Role
    pe: int
    address: str
    epoch: int
    channel: grpc.aio.Channel
    stub: worker_pb2_grpc.WorkerStub
    announcements: Announcements
    feed: TokenFeed
    load: int = 0
    awaited: set[str] = field(default_factory=set)
    _avoid_until: float = 0.0

    @classmethod
    def connect(cls, worker: WorkerAddress, epoch: int, max_message_bytes: int) -> "WorkerLink":
        options = [
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            ("grpc.enable_http_proxy", 0),
            ("grpc.max_reconnect_backoff_ms", 1000),
        ]
        channel = grpc.aio.insecure_channel(worker.address, options=options)
        stub = authorized(worker_pb2_grpc.WorkerStub(channel), worker.token)
        announcements, feed = Announcements(stub), TokenFeed(stub, epoch)
        return cls(worker.role, worker.pe, worker.address, epoch, channel, stub, announcements, feed)

    @property
    def reachable(self) -> bool:
        """False for a moment after a call has failed: faster than the supervisor's word, and no more than a hint."""
        return time.monotonic() >= self._avoid_until

    def avoid(self) -> None:
        self._avoid_until = time.monotonic() + AVOID_SECONDS

    async def abort(self, request_id: str, writer_quiet: bool = False) -> bool:
        """True when the worker has said that it neither computes nor writes for the request any more."""
        request = worker_pb2.AbortRequest(request_id=request_id, epoch=self.epoch, writer_quiet=writer_quiet)
        try:
            await self.stub.Abort(request, timeout=ABORT_SECONDS)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError):  # the latter when the channel is closed
            return False
        return True

    async def close(self) -> None:
        """Calls under way fail."""
        await self.announcements.close()
        await self.feed.close()
        await self.channel.close()

    async def status(self) -> inference_pb2.WorkerInfo:
        """What the worker says of itself; alive is false when it does not answer in time."""
        try:
            info = await self.stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=STATUS_SECONDS)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError):
            role = inference_pb2.ROLE_PREFILL if self.role == Role.PREFILL else inference_pb2.ROLE_DECODE
            info = inference_pb2.WorkerInfo(role=role, pe=self.pe, alive=False)
        info.address = self.address
        return info
