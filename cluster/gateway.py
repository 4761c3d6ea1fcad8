"""The door: tandem.v1.Inference over gRPC, with health and reflection."""

import itertools
import math
import time
from contextlib import aclosing
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tandem.cluster.admission import AdmissionQueue
from tandem.cluster.client_messages import RETRY_AFTER_KEY
from tandem.cluster.errors import DeadlineExceeded, InvalidRequest, Overloaded, ServerError, StartFailed, TandemError
from tandem.cluster.generation import Generation
from tandem.cluster.request import ModelLimits, RequestValidator, ValidRequest
from tandem.cluster.router import Placement, Router
from tandem.cluster.worker_link import WorkerAddress, WorkerLink
from tandem.proto import inference_pb2, inference_pb2_grpc
from tandem.workers.models.registry import load_config
from tandem.workers.tokenizer import Tokenizer
from tandem.workers.worker import kv_layout

Context = grpc.aio.ServicerContext
SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name

STATUS_OF_ERROR: dict[type[TandemError], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    ServerError: grpc.StatusCode.INTERNAL,
}
# What a worker's status means to the client of the gateway; any other is INTERNAL.
PASSED_ON = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.DATA_LOSS,
}
CLIENT_ID_KEY = "client-id"


@dataclass(frozen=True)
class GatewaySettings:
    """Everything a gateway process needs to know to start."""

    cluster: str
    island: str
    epoch: int
    transport: str
    workers: tuple[WorkerAddress, ...]
    model_path: str
    dtype: str
    max_model_len: int
    page_size: int
    num_pages: int
    host: str
    port: int
    max_queued: int
    max_queued_tokens: int
    queue_seconds: float
    request_seconds: float
    max_message_bytes: int


class Gateway(inference_pb2_grpc.InferenceServicer):
    """Validates, places, streams. start() and stop() run on the event loop that answers the calls."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._model = load_config(Path(settings.model_path), settings.dtype)
        self._tokenizer = Tokenizer.from_folder(Path(settings.model_path))
        limits = ModelLimits(
            vocab_size=self._model.vocab_size,
            max_model_len=settings.max_model_len,
            pool_tokens=settings.num_pages * settings.page_size,
        )
        self._validator = RequestValidator(limits, self._tokenizer)
        self._active: set[str] = set()
        self._attempts = itertools.count(1)
        self._started = time.monotonic()

    async def start(self) -> str:
        """Connects to the workers and opens the port; HOST:PORT. StartFailed when the port cannot be had."""
        settings = self._settings
        self._links = [
            WorkerLink.connect(worker, settings.epoch, settings.max_message_bytes) for worker in settings.workers
        ]
        queue = AdmissionQueue(settings.max_queued, settings.max_queued_tokens)
        self._router = Router(self._links, queue, queue_seconds=settings.queue_seconds)
        limit = settings.max_message_bytes
        options = [("grpc.max_receive_message_length", limit), ("grpc.max_send_message_length", limit)]
        # Without so_reuseport 0 a second gateway could share a port that is in use.
        self._server = grpc.aio.server(options=[*options, ("grpc.so_reuseport", 0)])
        inference_pb2_grpc.add_InferenceServicer_to_server(self, self._server)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # bound on import, unseen by pyright
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection([SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)
        try:
            port = self._server.add_insecure_port(f"{settings.host}:{settings.port}")
        except RuntimeError as error:
            raise StartFailed(
                f"gateway.port {settings.port} on {settings.host} cannot be opened; "
                "choose a free one, or 0 for any free one"
            ) from error
        await self._server.start()
        for service in ("", SERVICE):
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)
        return f"{settings.host}:{port}"

    async def stop(self, grace: float) -> None:
        """No new calls; calls under way have `grace` seconds, then they are cancelled and their pages given back."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace)
        await self._router.close()
        for link in self._links:
            await link.channel.close()

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:
        arrived = time.perf_counter()
        try:
            valid = self._validator.validate(request)
            if valid.request_id in self._active:
                raise InvalidRequest(f"request_id {valid.request_id!r} is in use by a request that still runs")
            self._active.add(valid.request_id)
        except InvalidRequest as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        try:
            await self._generate(valid, arrived, context)
        except Overloaded as error:
            advice = ((RETRY_AFTER_KEY, str(math.ceil(1000 * error.retry_after_seconds))),)
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error), trailing_metadata=advice)
        except TandemError as error:
            await context.abort(STATUS_OF_ERROR.get(type(error), grpc.StatusCode.INTERNAL), str(error))
        except grpc.aio.AioRpcError as error:
            await _pass_on(context, error)
        finally:
            self._active.discard(valid.request_id)

    async def _generate(self, valid: ValidRequest, arrived: float, context: Context) -> None:
        # Workers refuse an id once it was aborted; a client may use its own again.
        attempt_id = f"{valid.request_id}:{next(self._attempts)}"
        placement = await self._router.place(attempt_id, valid.token_ids, valid.params.max_tokens, _client_of(context))
        generation = Generation(valid, arrived, self._tokenizer, self._model.eos_token_ids)
        try:
            async with aclosing(generation.run(placement, self._seconds_left(context))) as messages:
                async for message in messages:
                    await context.write(message)
        finally:
            self._give_back(placement, generation.complete)

    def _give_back(self, placement: Placement, complete: bool) -> None:
        self._router.in_background(self._router.give_back(placement, complete))

    def _seconds_left(self, context: Context) -> float:
        remaining = context.time_remaining()
        limit = self._settings.request_seconds
        return limit if remaining is None else min(limit, remaining)

    async def GetModelInfo(
        self, request: inference_pb2.GetModelInfoRequest, context: Context
    ) -> inference_pb2.ModelInfo:
        model, settings = self._model, self._settings
        return inference_pb2.ModelInfo(
            name=Path(settings.model_path).name,
            architecture=model.architecture,
            dtype=str(model.dtype).removeprefix("torch."),
            vocab_size=model.vocab_size,
            max_model_len=settings.max_model_len,
            num_layers=model.num_layers,
            page_size=settings.page_size,
            kv_bytes_per_token=kv_layout(model, settings.page_size).token_bytes,
            eos_token_ids=model.eos_token_ids,
            has_tokenizer=self._tokenizer is not None,
            has_chat_template=self._tokenizer is not None and self._tokenizer.has_chat_template,
        )

    async def GetClusterInfo(
        self, request: inference_pb2.GetClusterInfoRequest, context: Context
    ) -> inference_pb2.ClusterInfo:
        settings = self._settings
        island = inference_pb2.IslandInfo(
            name=settings.island,
            epoch=settings.epoch,
            transport=settings.transport,
            workers=[await link.status() for link in self._links],
        )
        return inference_pb2.ClusterInfo(
            name=settings.cluster,
            version=version("tandem"),
            queued=self._router.queued,
            active=len(self._active),
            uptime_seconds=time.monotonic() - self._started,
            islands=[island],
        )


def _client_of(context: Context) -> str:
    """Whose request it is: what the metadata client-id says, else the host it comes from."""
    given = {key: value for key, value in context.invocation_metadata() or ()}.get(CLIENT_ID_KEY)
    return f"id:{given}" if given else context.peer().rpartition(":")[0]


async def _pass_on(context: Context, error: grpc.aio.AioRpcError) -> NoReturn:
    code = error.code()
    status = code if code in PASSED_ON else grpc.StatusCode.INTERNAL
    await context.abort(status, f"a worker answered {code.name}: {error.details()}")
    raise AssertionError("abort raises")
