"""A prefill and a decode worker on two GPUs, in 16 bits, through gRPC: the KV that arrives is what was computed."""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass

import grpc
import numpy as np
import pytest
import torch

from tandem.proto import inference_pb2, worker_pb2, worker_pb2_grpc
from tandem.transfer.codec import decode_runs
from tandem.workers.authentication import authorized
from tandem.workers.config import Role, WorkerConfig
from tandem.workers.messages import prompt_to_bytes
from tests.checkpoints import make_model
from tests.gpu.pe_process import PeProcess, pe_processes, together
from tests.gpu.worker_process import WorkerPe
from tests.oracle import random_prompt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),  # FlashInfer compiles its kernels
    pytest.mark.skipif(
        torch.cuda.device_count() < 2 or importlib.util.find_spec("nvshmem") is None,
        reason="needs two CUDA devices and nvshmem4py",
    ),
]

TOKEN = "a token of the workers"
EPOCH, PAGE, NUM_PAGES, LAYERS = 1, 16, 64, 3
GREEDY = inference_pb2.SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, seed=1)
PROMPT = random_prompt(6 * PAGE + 5, 0)
PROMPT_BYTES = prompt_to_bytes(PROMPT)
# dtype, head_dim, whether the decode worker's pages are mapped; the other way is by puts
ISLANDS = {
    "bf16-128-mapped": ("bfloat16", 128, True),
    "bf16-128-puts": ("bfloat16", 128, False),
    "bf16-64-mapped": ("bfloat16", 64, True),
    "fp16-128-mapped": ("float16", 128, True),
}


@dataclass(frozen=True)
class Pair:
    prefill: PeProcess
    decode: PeProcess
    prefill_stub: worker_pb2_grpc.WorkerStub
    decode_stub: worker_pb2_grpc.WorkerStub
    token_bytes: int

    def push(self, request_id: str) -> tuple[worker_pb2.RemoteSendResponse, np.ndarray]:
        """PROMPT through both workers; the answer, and the slots where its KV went."""
        ids = {"request_id": request_id, "epoch": EPOCH}
        reservation = self.decode_stub.PrepareReceive(
            worker_pb2.PrepareReceiveRequest(**ids, prompt=PROMPT_BYTES, max_tokens=4), timeout=60
        )
        answer = self.prefill_stub.RemoteSend(
            worker_pb2.RemoteSendRequest(**ids, prompt=PROMPT_BYTES, sampling=GREEDY, reservation=reservation),
            timeout=300,
        )
        return answer, decode_runs(reservation.position_map.runs[0], max_tokens=len(PROMPT)).slots()

    def abort(self, request_id: str) -> None:
        for stub in (self.prefill_stub, self.decode_stub):
            stub.Abort(worker_pb2.AbortRequest(request_id=request_id, epoch=EPOCH, writer_quiet=True), timeout=60)


@pytest.fixture(scope="module")
def processes() -> Iterator[list[PeProcess]]:
    with pe_processes(2, WorkerPe) as started:
        yield started


@pytest.fixture(scope="module", params=ISLANDS.values(), ids=list(ISLANDS))
def pair(
    request: pytest.FixtureRequest, processes: list[PeProcess], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    dtype, head_dim, mapped = request.param
    folder = tmp_path_factory.mktemp("model")
    make_model("llama", head_dim=head_dim, num_hidden_layers=LAYERS).save_pretrained(folder)
    for process, role in zip(processes, (Role.PREFILL, Role.DECODE), strict=True):
        config = WorkerConfig(
            role=role,
            island="pair",
            epoch=EPOCH,
            pe=process.pe,
            num_pes=2,
            model_path=str(folder),
            max_model_len=256,
            token=TOKEN,
            dtype=dtype,
            device="cuda",
            page_size=PAGE,
            prefix_sharing=role == Role.PREFILL,  # what the sender keeps goes page to page
            max_batch_tokens=32,
            transport="nvshmem",
        )
        process.begin("open", config, NUM_PAGES, mapped)
    handles = [process.finish() for process in processes]
    together(processes, "join", handles)
    prefill, decode = together(processes, "serve")
    with grpc.insecure_channel(prefill) as one, grpc.insecure_channel(decode) as other:
        stubs = [authorized(worker_pb2_grpc.WorkerStub(channel), TOKEN) for channel in (one, other)]
        yield Pair(processes[0], processes[1], *stubs, token_bytes=LAYERS * 2 * 2 * head_dim * 2)
    together(processes, "stop")


def test_what_is_pushed_arrives_bit_for_bit(pair: Pair) -> None:
    """First token by token while it is computed, in chunks, then page to page from what the sender keeps."""
    for request_id, cached in (("computed", 0), ("cached", len(PROMPT) // PAGE * PAGE)):
        answer, slots = pair.push(request_id)
        assert answer.cached_tokens == cached
        assert answer.bytes_pushed == len(PROMPT) * pair.token_bytes
        assert answer.push_seconds > 0
        arrived, computed = pair.decode.do("at_slots", slots), pair.prefill.do("of_prefix", PROMPT)
        assert len(arrived) == len(computed) == 2 * LAYERS
        for there, here in zip(arrived, computed, strict=True):
            assert here.any()
            assert np.array_equal(there[: len(here)], here)
            assert there[len(here) :].any()
        pair.abort(request_id)


def test_the_decode_worker_goes_on_from_it(pair: Pair) -> None:
    """The same tokens twice, which the decode worker has from different pages each time."""
    tokens = []
    for request_id in ("one", "two"):
        ids = {"request_id": request_id, "epoch": EPOCH}
        reservation = pair.decode_stub.PrepareReceive(
            worker_pb2.PrepareReceiveRequest(**ids, prompt=PROMPT_BYTES, max_tokens=4), timeout=60
        )
        pair.prefill_stub.RemoteSend(
            worker_pb2.RemoteSendRequest(**ids, prompt=PROMPT_BYTES, sampling=GREEDY, reservation=reservation),
            timeout=300,
        )
        start = worker_pb2.StartGenerateRequest(**ids, reservation_id=reservation.reservation_id, sampling=GREEDY)
        stream = pair.decode_stub.StartGenerate(start, timeout=300)
        tokens.append([token for message in stream for token in message.token_ids])
    assert len(tokens[0]) == 3
    assert tokens[0] == tokens[1]
    status = pair.decode_stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=60)
    assert status.free_pages == NUM_PAGES
