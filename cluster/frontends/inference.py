"""The service of tandem's own protocol, tandem.v1.Inference, over gRPC."""

from collections.abc import Awaitable, Callable
from typing import NoReturn

import grpc

from tandem.cluster.errors import RateLimited, TandemError, UnknownModel
from tandem.cluster.errors.statuses import grpc_status, refuse
from tandem.cluster.frontends.grpc_server import host_of
from tandem.cluster.keys.key_cells import Sum
from tandem.cluster.protocol import CLIENT_ID_KEY
from tandem.cluster.requests.active_requests import ActiveRequests
from tandem.cluster.requests.embedding.embeddings import Caller, Embeddings
from tandem.cluster.requests.origin import TRACEPARENT_KEY, Origin, current_origin
from tandem.proto import inference_pb2, inference_pb2_grpc
from tandem.workers.ports.authentication import HEADER

Context = grpc.aio.ServicerContext


class Inference(inference_pb2_grpc.InferenceServicer):
    """Runs requests, and tells of the model and the cluster."""

    def __init__(
        self,
        requests: ActiveRequests,
        embeddings: Embeddings,
        model: inference_pb2.ModelInfo,
        cluster: Callable[[], Awaitable[inference_pb2.ClusterInfo]],
        for_keys: Callable[[], inference_pb2.ClusterInfo],
        rejected: Callable[[str], None],
    ) -> None:
        """cluster: asks all workers. for_keys: what holders of keys hear of the cluster. rejected: counts a failed call
        by the name of its status."""
        self._requests = requests
        self._embeddings = embeddings
        self._model = model
        self._cluster, self._for_keys = cluster, for_keys
        self._rejected = rejected

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:
        _name(request.request_id, context)
        try:
            serving = self._requests.serve(
                request,
                _client_of(context),
                context.write,
                host=host_of(context),
                credential=_metadata(context, HEADER),
                seconds=context.time_remaining(),
            )
            del request  # which may be large, and the call long
            await serving
        except TandemError as error:
            await self._refuse(context, error)

    async def Embed(self, request: inference_pb2.EmbedRequest, context: Context) -> inference_pb2.EmbedResponse:
        _name(request.request_id, context)
        credential, dimensions = _metadata(context, HEADER), request.dimensions or None
        caller = Caller(_client_of(context), host_of(context), credential, context.time_remaining())
        try:
            with self._embeddings.embedding_room(len(request.inputs), dimensions):
                request_id, answer = await self._embeddings.embed(request, caller)
        except TandemError as error:
            await self._refuse(context, error)
        return inference_pb2.EmbedResponse(
            request_id=request_id,
            values=answer.values.astype("<f4", copy=False).tobytes(),
            dimensions=answer.values.shape[1],
            usage=answer.usage,
            timings=answer.timings,
        )

    async def _refuse(self, context: Context, error: TandemError) -> NoReturn:
        if isinstance(error, UnknownModel):
            current_origin.get().access.refused(Sum.REFUSED_MODEL)
        if not isinstance(error, RateLimited):  # which its key counts: it says nothing of the cluster's load
            self._rejected(grpc_status(error).name)
        await refuse(context, error)

    async def GetModelInfo(
        self, request: inference_pb2.GetModelInfoRequest, context: Context
    ) -> inference_pb2.ModelInfo:
        return self._model

    async def GetClusterInfo(
        self, request: inference_pb2.GetClusterInfoRequest, context: Context
    ) -> inference_pb2.ClusterInfo:
        return self._for_keys() if current_origin.get().access.name else await self._cluster()


def _name(request_id: str, context: Context) -> None:
    """Tells the request's observers the id by which its client knows it. The caller's rights stay."""
    access = current_origin.get().access
    current_origin.set(Origin("grpc", request_id, traceparent=_metadata(context, TRACEPARENT_KEY), access=access))


def _client_of(context: Context) -> str:
    """Returns the client that a request belongs to: its key, else its metadata client-id, else its host."""
    access = current_origin.get().access
    if access.name:
        return f"key:{access.name}"
    given = _metadata(context, CLIENT_ID_KEY)
    return f"id:{given}" if given else host_of(context)


def _metadata(context: Context, wanted: str) -> str:
    """Returns the last value of a metadata key; empty if there is none."""
    return str(dict(context.invocation_metadata() or ()).get(wanted, ""))
