"""gRPC's reflection, by which tools such as grpcurl learn of services: version v1, and v1alpha of older tools."""

from collections.abc import Sequence
from typing import Any

import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

ALPHA = reflection.SERVICE_NAME
V1 = ALPHA.replace("v1alpha", "v1")
METHOD = "ServerReflectionInfo"


def enable_reflection(services: Sequence[str], server: grpc.aio.Server) -> None:
    """Adds both versions, which list themselves, too. On the wire they are the same but for their names."""
    servicer = reflection.aio.ReflectionServicer((*services, V1, ALPHA), pool=Files())
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(V1, {METHOD: handler}),))


class Files:
    """A descriptor pool: all that this process has imported, and reflection's version v1, which no package has."""

    def __init__(self) -> None:
        self._own = descriptor_pool.DescriptorPool()
        self._own.Add(_v1_file())
        self._imported = descriptor_pool.Default()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._imported, name)

    def FindFileByName(self, name: str) -> Any:
        try:
            return self._own.FindFileByName(name)
        except KeyError:
            return self._imported.FindFileByName(name)

    def FindFileContainingSymbol(self, symbol: str) -> Any:
        try:
            return self._own.FindFileContainingSymbol(symbol)
        except KeyError:
            return self._imported.FindFileContainingSymbol(symbol)


def _v1_file() -> descriptor_pb2.FileDescriptorProto:
    alpha, v1 = descriptor_pb2.FileDescriptorProto(), descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(alpha)
    return text_format.Parse(text_format.MessageToString(alpha).replace("v1alpha", "v1"), v1)
