"""A cluster, requests to its gateway, and requests past it to the prefill worker of a pair."""

import itertools
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import grpc
import numpy as np

from tandem.cluster.client import Client
from tandem.cluster.client.client_messages import CHANNEL_OPTIONS, Timings
from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.processes.processes import Processes
from tandem.cluster.supervision.launcher import Cluster
from tandem.proto import inference_pb2, worker_pb2, worker_pb2_grpc
from tandem.workers.ports.authentication import authorized
from tandem.workers.wire.seal import seal
from tests.benchmarks.load import LOWEST_TOKEN
from tests.support.prompt_specs import prompt_message

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
CALL_SECONDS = 120.0


@dataclass(frozen=True)
class Prefill:
    """One prompt at the prefill worker. seconds: of the call; worker_seconds: from its first forward to the signal."""

    seconds: float
    worker_seconds: float
    bytes_pushed: int
    first_token: int


@dataclass(frozen=True)
class Request:
    """One request through the gateway. arrivals: seconds from the call to each token; timings: the gateway's."""

    arrivals: list[float]
    timings: Timings


@contextmanager
def running_cluster(
    config: str, model: Path, overrides: dict[str, Any], processes: Processes | None = None
) -> Iterator[Cluster]:
    """deploy/`config` under a name of this process, on any port, with random weights in the shape of `model`.

    processes: None starts a Ray."""
    common = {
        "name": f"bench-{os.getpid()}",
        "gateway.port": 0,
        "model.path": str(model),
        "model.load_format": "dummy",
    }
    cluster = Cluster(load_config(DEPLOY / config, common | overrides), processes)
    cluster.start()
    try:
        yield cluster
    finally:
        cluster.stop()


class Requests:
    """Calls to the gateway of a running cluster that shares no prefixes."""

    def __init__(self, address: str) -> None:
        self._client = Client(address)
        info = self._client.model_info()
        self.vocab_size, self.token_bytes = info.vocab_size, info.kv_bytes_per_token
        self._numbers = itertools.count()

    def prompt(self, length: int) -> list[int]:
        """A new one each time."""
        rng = np.random.default_rng((os.getpid(), next(self._numbers)))
        return rng.integers(LOWEST_TOKEN, self.vocab_size, length).tolist()

    def request(self, prompt: Sequence[int], count: int) -> Request:
        """One request for `count` tokens through the gateway."""
        arrivals: list[float] = []
        timings = None
        began = time.perf_counter()
        for update in self._client.generate(
            prompt, timeout=CALL_SECONDS, max_tokens=count, temperature=0, ignore_eos=True
        ):
            arrivals += [time.perf_counter() - began] * len(update.token_ids)
            timings = update.timings
        assert timings is not None, "the last message has them"
        return Request(arrivals, timings)

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Pair(Requests):
    """Calls to a running cluster of one prefill and one decode worker that shares no prefixes."""

    def __init__(self, address: str, worker_token: str) -> None:
        super().__init__(address)
        self._worker_token = worker_token
        island = self._client.cluster_info().islands[0]
        self._epoch = island.epoch
        self._channels = [grpc.insecure_channel(worker.address, options=CHANNEL_OPTIONS) for worker in island.workers]
        by_role = {
            worker.role: authorized(worker_pb2_grpc.WorkerStub(channel), worker_token)
            for worker, channel in zip(island.workers, self._channels, strict=True)
        }
        self._sender, self._receiver = by_role[inference_pb2.ROLE_PREFILL], by_role[inference_pb2.ROLE_DECODE]

    def prefill(self, prompt: Sequence[int], *, push: bool) -> Prefill:
        """The prefill worker alone: computes the whole prompt and answers with the first token.

        push: into pages that the decode worker has set aside, as for a request. Else it is told, as when a prefix is
        cached there, that the decode worker holds the prompt's KV but for the last position, and writes that one.
        """
        request_id = f"bench-{uuid.uuid4().hex}"  # workers remember the answers to ids they know
        missing = len(prompt) if push else 1
        reservation = self._receiver.PrepareReceive(
            worker_pb2.PrepareReceiveRequest(
                request_id=request_id, epoch=self._epoch, prompt=prompt_message(prompt[-missing:]), max_tokens=1
            ),
            timeout=CALL_SECONDS,
        )
        reservation.matched_tokens = reservation.position_map.start_position = len(prompt) - missing
        seal(reservation, self._worker_token)
        send = worker_pb2.RemoteSendRequest(
            request_id=request_id,
            epoch=self._epoch,
            prompt=prompt_message(prompt),
            sampling=inference_pb2.SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, seed=1),
            reservation=reservation,
        )
        began = time.perf_counter()
        answer = self._sender.RemoteSend(send, timeout=CALL_SECONDS)
        seconds = time.perf_counter() - began
        abort = worker_pb2.AbortRequest(request_id=request_id, epoch=self._epoch, writer_quiet=True)
        self._receiver.Abort(abort, timeout=CALL_SECONDS)
        return Prefill(seconds, answer.prefill_seconds, answer.bytes_pushed, answer.first_token)

    def close(self) -> None:
        for channel in self._channels:
            channel.close()
        super().close()
