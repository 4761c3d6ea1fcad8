"""A prefill and a decode worker in processes of their own, on GPUs, and calls to both."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from tandem.proto import inference_pb2, worker_pb2, worker_pb2_grpc
from tandem.transfer.codec import decode_runs
from tandem.workers.config import Role, WorkerConfig
from tandem.workers.ports.authentication import authorized
from tests.gpu.pe_process import PeProcess, finish_all, together
from tests.support.prompt_specs import prompt_message

TOKEN = "a token of the workers"
EPOCH, PAGE, NUM_PAGES = 1, 16, 64
MAX_TOKENS = 4
GREEDY = inference_pb2.SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, seed=1)


@dataclass(frozen=True)
class Pair:
    epoch: int
    prefill: PeProcess
    decode: PeProcess
    prefill_stub: worker_pb2_grpc.WorkerStub
    decode_stub: worker_pb2_grpc.WorkerStub

    def prepare(self, request_id: str, prompt: Sequence[int]) -> worker_pb2.Reservation:
        request = worker_pb2.PrepareReceiveRequest(
            request_id=request_id, epoch=self.epoch, prompt=prompt_message(prompt), max_tokens=MAX_TOKENS
        )
        return self.decode_stub.PrepareReceive(request, timeout=60)

    def send(
        self, request_id: str, prompt: Sequence[int], reservation: worker_pb2.Reservation
    ) -> worker_pb2.RemoteSendResponse:
        request = worker_pb2.RemoteSendRequest(
            request_id=request_id,
            epoch=self.epoch,
            prompt=prompt_message(prompt),
            sampling=GREEDY,
            reservation=reservation,
        )
        return self.prefill_stub.RemoteSend(request, timeout=300)

    def start(self, request_id: str, reservation: worker_pb2.Reservation) -> list[int]:
        """The tokens after the first."""
        request = worker_pb2.StartGenerateRequest(
            request_id=request_id, epoch=self.epoch, reservation_id=reservation.reservation_id, sampling=GREEDY
        )
        stream = self.decode_stub.StartGenerate(request, timeout=300)
        return [token for message in stream for token in message.token_ids]

    def push(
        self, request_id: str, prompt: Sequence[int], *, announced: bool = False
    ) -> tuple[worker_pb2.RemoteSendResponse, np.ndarray]:
        """A prompt through both workers; the answer, and the slots where its KV went. announced: its beginning is
        computed before that is known."""
        if announced:
            announcement = worker_pb2.AnnounceRequest(request_id=request_id, epoch=EPOCH, prompt=prompt_message(prompt))
            list(self.prefill_stub.Announce(iter([announcement]), timeout=60))
            assert self.status()[0].waiting == 1
        reservation = self.prepare(request_id, prompt)
        answer = self.send(request_id, prompt, reservation)
        return answer, decode_runs(reservation.position_map.runs[0], max_tokens=len(prompt)).slots()

    def abort(self, request_id: str) -> None:
        for stub in (self.prefill_stub, self.decode_stub):
            stub.Abort(worker_pb2.AbortRequest(request_id=request_id, epoch=self.epoch, writer_quiet=True), timeout=60)

    def status(self) -> tuple[inference_pb2.WorkerInfo, inference_pb2.WorkerInfo]:
        """The prefill worker's and the decode worker's."""
        one, other = (
            stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=60) for stub in (self.prefill_stub, self.decode_stub)
        )
        return one, other


def pair_configs(model: Path, epoch: int = EPOCH, *, max_batch_tokens: int = 32, **settings: Any) -> list[WorkerConfig]:
    """The prefill worker's, on PE 0, and the decode worker's. settings: of both."""
    return [
        WorkerConfig(
            role=role,
            island="pair",
            epoch=epoch,
            pe=pe,
            num_pes=2,
            model_path=str(model),
            max_model_len=256,
            token=TOKEN,
            device="cuda",
            page_size=PAGE,
            prefix_sharing=role == Role.PREFILL,  # what the sender keeps goes page to page
            max_batch_tokens=max_batch_tokens,
            transport="nvshmem",
            **settings,
        )
        for pe, role in enumerate((Role.PREFILL, Role.DECODE))
    ]


def each(processes: list[PeProcess], method: str, configs: list[WorkerConfig], *arguments: Any) -> None:
    """A call to every process, with its own config."""
    for process, config in zip(processes, configs, strict=True):
        process.begin(method, config, *arguments)
    finish_all(processes)


def form(processes: list[PeProcess], num_pages: int) -> list[str]:
    """Makes one island of workers, in the order of their PEs, that have loaded or rejoined; where each listens."""
    handles = together(processes, "open", num_pages)
    together(processes, "join", handles)
    return together(processes, "serve")


@contextmanager
def serving_pair(processes: list[PeProcess], epoch: int = EPOCH) -> Iterator[Pair]:
    """Runs workers, in the order of their PEs, that have loaded or rejoined. They leave at the end."""
    prefill, decode = form(processes, NUM_PAGES)
    with grpc.insecure_channel(prefill) as one, grpc.insecure_channel(decode) as other:
        stubs = [authorized(worker_pb2_grpc.WorkerStub(channel), TOKEN) for channel in (one, other)]
        try:
            yield Pair(epoch, processes[0], processes[1], *stubs)
        finally:
            together(processes, "leave")


@contextmanager
def running_pair(processes: list[PeProcess], model: Path, mapped: bool, **settings: Any) -> Iterator[Pair]:
    """mapped: whether the decode worker's pages are; else all goes by puts. settings: of both WorkerConfigs."""
    each(processes, "load", pair_configs(model, **settings), mapped)
    with serving_pair(processes) as pair:
        assert pair.prefill.do("is_mapped", 1) == mapped
        yield pair
    together(processes, "stop")
