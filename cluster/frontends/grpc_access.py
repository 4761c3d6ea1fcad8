"""Admits calls to the gateway's methods over gRPC."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from tandem.cluster.errors import CallError, RateLimited
from tandem.cluster.errors.statuses import grpc_status, refuse
from tandem.cluster.keys.gate import Gate
from tandem.cluster.requests.origin import Origin, current_origin
from tandem.proto import inference_pb2
from tandem.workers.ports.authentication import HEADER, OPEN_METHODS, denial
from tandem.workers.ports.ended_calls import heed_end

FOR_KEYS = (inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name, "grpc.reflection.")
"""The beginnings of the methods that the holder of a key may call."""


class AccessRequired(grpc.aio.ServerInterceptor):
    """Ends strangers' calls with UNAUTHENTICATED, and a key's calls to an operator's method with PERMISSION_DENIED.
    All others find their Access in current_origin."""

    def __init__(self, gate: Gate, denied: Callable[[str], None]) -> None:
        """denied: called with the status of each call that is denied, except for lack of a slot to count its key."""
        self._gate = gate
        self._denied = denied

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        method = handler_call_details.method
        if method in OPEN_METHODS:
            return await continuation(handler_call_details)
        given = [value for key, value in handler_call_details.invocation_metadata or () if key == HEADER]
        try:
            access = self._gate.access(given)
            if access is None:
                self._denied(grpc.StatusCode.UNAUTHENTICATED.name)
                return denial()
            if not method.lstrip("/").startswith(FOR_KEYS):
                access.check_route(f"{method!r:.160}")
        except CallError as error:
            if not isinstance(error, RateLimited):  # which says nothing of the cluster's load
                self._denied(grpc_status(error).name)
            return refusal(error)
        current_origin.set(Origin("grpc", access=access))
        return await continuation(handler_call_details)


def refusal(error: CallError) -> Any:
    """Makes a method that refuses its call without reading the request."""

    async def behave(_: object, context: grpc.aio.ServicerContext) -> None:
        await heed_end()
        await refuse(context, error)

    return grpc.stream_unary_rpc_method_handler(behave)
