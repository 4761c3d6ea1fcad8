"""A gateway that answers as a test tells it to, for tests of clients and the command line."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc

from tandem.proto import inference_pb2, inference_pb2_grpc


@dataclass
class FakeGateway(inference_pb2_grpc.InferenceServicer):
    """Streams one word a message, and `stop` at the end. With `fails` set it ends with that status after `words`.

    Words of further answers have their index at the end. The first answer ends last.
    """

    words: tuple[str, ...] = ("one", " two")
    fails: tuple[grpc.StatusCode, str] | None = None
    hangs: bool = False
    requests: list[inference_pb2.GenerateRequest] = field(default_factory=list)
    client_ids: list[str] = field(default_factory=list)
    peers: list[str] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)

    def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        self.requests.append(request)
        self.peers.append(context.peer())
        self.client_ids += [str(value) for key, value in context.invocation_metadata() if key == "client-id"]
        context.add_callback(self.cancelled.set)
        indices = range(request.sampling.n or 1)
        for token, word in enumerate(self.words):
            for index in indices:
                text = f"{word}{index or ''}" if word else ""
                yield inference_pb2.GenerateResponse(request_id="r", token_ids=[token], text=text, index=index)
        if self.hangs:
            self.cancelled.wait(10)
        if self.fails is not None:
            context.abort(*self.fails)
        for index in reversed(indices):
            usage = inference_pb2.Usage(prompt_tokens=3, output_tokens=len(self.words) * len(indices))
            yield inference_pb2.GenerateResponse(
                request_id="r",
                finish_reason=inference_pb2.FINISH_REASON_STOP,
                usage=None if index else usage,
                timings=inference_pb2.Timings(bytes_pushed=7, total_seconds=0.5),
                index=index,
            )

    def GetModelInfo(
        self, request: inference_pb2.GetModelInfoRequest, context: grpc.ServicerContext
    ) -> inference_pb2.ModelInfo:
        if self.fails is not None:
            context.abort(*self.fails)
        return inference_pb2.ModelInfo(name="tiny", vocab_size=512)

    def GetClusterInfo(
        self, request: inference_pb2.GetClusterInfoRequest, context: grpc.ServicerContext
    ) -> inference_pb2.ClusterInfo:
        worker = inference_pb2.WorkerInfo(role=inference_pb2.ROLE_DECODE, pe=1, alive=True, num_pages=64, free_pages=63)
        lost = inference_pb2.WorkerInfo(role=inference_pb2.ROLE_PREFILL, pe=0)
        island = inference_pb2.IslandInfo(name="i", epoch=1, transport="shared_memory", workers=[lost, worker])
        lost_island = inference_pb2.IslandInfo(name="j", epoch=7, transport="shared_memory", restarts=6)
        processes = [
            inference_pb2.GatewayProcessInfo(process=0, pid=4711, active=1, calls=2, host="10.0.0.7"),
            inference_pb2.GatewayProcessInfo(process=1, restarts=2, host="10.0.0.7"),
        ]
        return inference_pb2.ClusterInfo(
            name="c", version="0", islands=[island, lost_island], gateway_restarts=2, gateways=processes
        )


@contextmanager
def serving(gateway: FakeGateway) -> Iterator[str]:
    """Yields HOST:PORT of the gateway, for as long as the context lasts."""
    with ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool)
        inference_pb2_grpc.add_InferenceServicer_to_server(gateway, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            gateway.cancelled.set()
            server.stop(0).wait()
