"""Clients of a gateway, one that blocks and one for asyncio. Every call has a deadline; errors are CallErrors.

A stream that breaks because the gateway is started again goes on where it was, for resume_seconds at the longest. With
several gateways it goes on at another one.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, ClassVar, Generic, Self, TypeVar, Unpack

import grpc
import grpc.aio
from google.protobuf.message import Message

from tandem.cluster.client.client_messages import (
    CHANNEL_OPTIONS,
    LONGEST_CALL,
    SEVERAL_OPTIONS,
    GenerateUpdate,
    adapter_request,
    call_error,
    client_metadata,
    is_gone,
    scale_request,
    split_addresses,
    update,
)
from tandem.cluster.client.embeddings import Embeddings, EmbedOptions, Inputs, embed_request, embeddings_of
from tandem.cluster.client.resumption import Resumption
from tandem.cluster.credentials import ClientSecurity
from tandem.cluster.protocol import Options, Prompt, build_request
from tandem.proto import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc

GENERATE_SECONDS = 600.0
RESUME_SECONDS = 60.0
INFO_SECONDS = 10.0
SCALE_SECONDS = 600.0
ADAPTER_SECONDS = 120.0
NO_SECURITY = ClientSecurity()
UpdatesT = TypeVar("UpdatesT")
ModelT = TypeVar("ModelT")
ClusterT = TypeVar("ClusterT")
ScaledT = TypeVar("ScaledT")
MetricsT = TypeVar("MetricsT")
TraceT = TypeVar("TraceT")
AdapterT = TypeVar("AdapterT")
AdaptersT = TypeVar("AdaptersT")


@dataclass(frozen=True)
class _Gateway:
    """A connection to one gateway. It is opened with the first call."""

    address: str
    channel: Any
    inference: Any
    admin: Any


class _Connection(ABC, Generic[UpdatesT, ModelT, ClusterT, ScaledT, MetricsT, TraceT, AdapterT, AdaptersT]):
    """Channels to gateways, and the calls of both clients. Each client gives the types that its calls return."""

    _grpc: ClassVar[ModuleType]  # grpc or grpc.aio, whose channels have the same makers

    def __init__(
        self,
        address: str | Sequence[str],
        security: ClientSecurity = NO_SECURITY,
        resume_seconds: float = RESUME_SECONDS,
        client_id: str | None = None,
    ) -> None:
        """address: HOST:PORT, or several of one cluster, as a list or with commas between: the first is used until it
        is gone, then the next, and after the last the first again. client_id: the user whose requests take turns
        together; None makes a new one.

        ConfigError unless client_id is printable ASCII, of 1 to 128 characters, for an empty address, and for what
        ClientSecurity refuses.
        """
        addresses = split_addresses(address)
        self._metadata = client_metadata(client_id)
        self._resume_seconds = resume_seconds
        self._answered = False
        options = (*CHANNEL_OPTIONS, *(SEVERAL_OPTIONS if len(addresses) > 1 else ()))
        self._gateways = [self._open(one, security, options) for one in addresses]
        self._used = 0

    @property
    def address(self) -> str:
        """HOST:PORT of the gateway in use."""
        return self._gateway.address

    @property
    def _gateway(self) -> _Gateway:
        return self._gateways[self._used]

    def _open(self, address: str, security: ClientSecurity, options: Sequence[tuple[str, int]]) -> _Gateway:
        credentials = security.credentials(address)
        channel = (
            self._grpc.insecure_channel(address, options=options)
            if credentials is None
            else self._grpc.secure_channel(address, credentials, options=options)
        )
        inference = security.authorize(inference_pb2_grpc.InferenceStub(channel))
        return _Gateway(address, channel, inference, security.authorize(admin_pb2_grpc.AdminStub(channel)))

    def _leave(self, gone: _Gateway) -> None:
        """Switches to the next gateway, unless another call has done so already."""
        if self._gateway is gone:
            self._used = (self._used + 1) % len(self._gateways)

    def generate(
        self,
        prompt: Prompt,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        timeout: float = GENERATE_SECONDS,
        **sampling: Unpack[Options],
    ) -> UpdatesT:
        """Sends the request when first iterated; closing the generator cancels it. timeout in seconds.

        cache_salt: only requests with equal salts share cached prefixes; at most 256 characters.
        """
        return self._updates(build_request(prompt, sampling, request_id, cache_salt), timeout)

    def _embed(self, request: inference_pb2.EmbedRequest, timeout: float) -> Any:
        metadata = self._metadata
        return self._ask(lambda one: partial(one.inference.Embed, metadata=metadata), request, timeout)

    def model_info(self, timeout: float = INFO_SECONDS) -> ModelT:
        return self._ask(lambda one: one.inference.GetModelInfo, inference_pb2.GetModelInfoRequest(), timeout)

    def cluster_info(self, timeout: float = INFO_SECONDS) -> ClusterT:
        return self._ask(lambda one: one.inference.GetClusterInfo, inference_pb2.GetClusterInfoRequest(), timeout)

    def metrics(self, timeout: float = INFO_SECONDS) -> MetricsT:
        """Returns the text of /metrics, in Prometheus' format."""
        return self._ask(lambda one: one.admin.GetMetrics, admin_pb2.GetMetricsRequest(), timeout)

    def trace(self, request_id: str, timeout: float = INFO_SECONDS) -> TraceT:
        """Returns the spans of a request that has ended; an empty trace if no gateway process keeps them."""
        return self._ask(lambda one: one.admin.GetTrace, admin_pb2.GetTraceRequest(request_id=request_id), timeout)

    def add_adapter(
        self, name: str, path: str, *, load_inplace: bool = False, timeout: float = ADAPTER_SECONDS
    ) -> AdapterT:
        """Serves the LoRA adapter in a PEFT folder under a name, which requests give as their model.

        load_inplace: the adapter replaces other weights of that name. Raises InvalidRequest and AdapterRefused; then
        nothing has changed.
        """
        request = adapter_request(name, path, load_inplace=load_inplace)
        return self._ask(lambda one: one.admin.AddAdapter, request, timeout)

    def remove_adapter(self, name: str, *, timeout: float = ADAPTER_SECONDS) -> AdapterT:
        """Stops serving an adapter: new requests that name it are refused. Raises UnknownModel if no adapter has that
        name."""
        request = admin_pb2.UnserveAdapterRequest(name=name)
        return self._ask(lambda one: one.admin.RemoveAdapter, request, timeout)

    def adapters(self, timeout: float = INFO_SECONDS) -> AdaptersT:
        return self._ask(lambda one: one.admin.ListAdapters, admin_pb2.ListAdaptersRequest(), timeout)

    def scale(
        self,
        island: str = "",
        *,
        num_prefill: int | None = None,
        num_decode: int | None = None,
        num_islands: int | None = None,
        timeout: float = SCALE_SECONDS,
    ) -> ScaledT:
        """Gives a running island another shape and returns when it serves again; None leaves a role as it is.

        island may be empty if there is only one. num_islands: of the whole cluster, without other numbers; returns when
        the new islands serve, or when the leaving ones have ended. Raises ScaleRefused; then all serve as before.
        """
        return self._ask(
            lambda one: one.admin.Scale, scale_request(island, num_prefill, num_decode, num_islands), timeout
        )

    @abstractmethod
    def _ask(self, call: Callable[[_Gateway], Any], request: Message, timeout: float) -> Any:
        """Makes a call with one answer, at the first gateway that is there."""

    @abstractmethod
    def _updates(self, request: inference_pb2.GenerateRequest, timeout: float) -> UpdatesT: ...

    def _pause(self, error: grpc.RpcError, resumption: Resumption, gateway: _Gateway, timeout: float) -> float | None:
        """Returns the seconds until a request whose stream broke is sent again; None when all of it has come. Raises
        CallError."""
        if resumption.finished:
            return None
        pause = resumption.pause(error, self._answered)
        if pause is None:
            raise call_error(gateway.address, error, resumption.request, timeout) from None
        if is_gone(error):
            self._leave(gateway)
        return pause


class Client(
    _Connection[
        Generator[GenerateUpdate, None, None],
        inference_pb2.ModelInfo,
        inference_pb2.ClusterInfo,
        admin_pb2.ScaleResponse,
        admin_pb2.GetMetricsResponse,
        admin_pb2.GetTraceResponse,
        admin_pb2.ServedAdapter,
        admin_pb2.ListAdaptersResponse,
    ]
):
    """A blocking client for one or more gateways, for use from any thread: `with Client(address) as client: …`."""

    _grpc = grpc

    def _ask(self, call: Callable[[_Gateway], Any], request: Message, timeout: float) -> Any:
        for others in reversed(range(len(self._gateways))):
            gateway = self._gateway
            try:
                answer = call(gateway)(request, timeout=min(timeout, LONGEST_CALL))
            except grpc.RpcError as error:
                if is_gone(error):
                    self._leave(gateway)
                    if others:
                        continue
                raise call_error(gateway.address, error, request, timeout) from None
            self._answered = True
            return answer
        raise AssertionError("there is at least one gateway")

    def embed(
        self,
        inputs: Inputs,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        timeout: float = GENERATE_SECONDS,
        **options: Unpack[EmbedOptions],
    ) -> Embeddings:
        """Embeds texts or token ids, one or a list of them. options: see docs/http-and-grpc.md."""
        request = embed_request(inputs, options, request_id, cache_salt)
        return embeddings_of(self._embed(request, timeout), len(request.inputs))

    def _updates(self, request: inference_pb2.GenerateRequest, timeout: float) -> Generator[GenerateUpdate, None, None]:
        resumption = Resumption(request, timeout, self._resume_seconds)
        while True:
            gateway = self._gateway
            call = gateway.inference.Generate(request, timeout=resumption.seconds_left, metadata=self._metadata)
            try:
                for message in call:
                    self._answered = True
                    resumption.add(message)
                    yield update(message)
                return
            except grpc.RpcError as error:
                pause = self._pause(error, resumption, gateway, timeout)
            finally:
                call.cancel()
            if pause is None:
                return
            time.sleep(pause)

    def close(self) -> None:
        for gateway in self._gateways:
            gateway.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class AsyncClient(
    _Connection[
        AsyncGenerator[GenerateUpdate, None],
        Coroutine[Any, Any, inference_pb2.ModelInfo],
        Coroutine[Any, Any, inference_pb2.ClusterInfo],
        Coroutine[Any, Any, admin_pb2.ScaleResponse],
        Coroutine[Any, Any, admin_pb2.GetMetricsResponse],
        Coroutine[Any, Any, admin_pb2.GetTraceResponse],
        Coroutine[Any, Any, admin_pb2.ServedAdapter],
        Coroutine[Any, Any, admin_pb2.ListAdaptersResponse],
    ]
):
    """Client for one asyncio loop: `async with AsyncClient(address) as client: …`."""

    _grpc = grpc.aio

    async def _ask(self, call: Callable[[_Gateway], Any], request: Message, timeout: float) -> Any:
        for others in reversed(range(len(self._gateways))):
            gateway = self._gateway
            try:
                answer = await call(gateway)(request, timeout=min(timeout, LONGEST_CALL))
            except grpc.RpcError as error:
                if is_gone(error):
                    self._leave(gateway)
                    if others:
                        continue
                raise call_error(gateway.address, error, request, timeout) from None
            self._answered = True
            return answer
        raise AssertionError("there is at least one gateway")

    async def embed(
        self,
        inputs: Inputs,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        timeout: float = GENERATE_SECONDS,
        **options: Unpack[EmbedOptions],
    ) -> Embeddings:
        """Does what Client.embed() does."""
        request = embed_request(inputs, options, request_id, cache_salt)
        return embeddings_of(await self._embed(request, timeout), len(request.inputs))

    async def _updates(
        self, request: inference_pb2.GenerateRequest, timeout: float
    ) -> AsyncGenerator[GenerateUpdate, None]:
        resumption = Resumption(request, timeout, self._resume_seconds)
        while True:
            gateway = self._gateway
            call = gateway.inference.Generate(request, timeout=resumption.seconds_left, metadata=self._metadata)
            try:
                async for message in call:
                    self._answered = True
                    resumption.add(message)
                    yield update(message)
                return
            except grpc.RpcError as error:
                pause = self._pause(error, resumption, gateway, timeout)
            finally:
                call.cancel()
            if pause is None:
                return
            await asyncio.sleep(pause)

    async def close(self) -> None:
        for gateway in self._gateways:
            await gateway.channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()
