"""An island that serves LoRA adapters, whose workers are called as a gateway calls them, and the tokens to expect."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem.proto import inference_pb2, worker_pb2, worker_pb2_grpc
from tandem.workers.config import AdapterSettings
from tandem.workers.ports.authentication import authorized
from tests.support import island as islands
from tests.support.adapters import by_peft, merged
from tests.support.oracle import greedy
from tests.support.prompt_specs import prompt_message

EPOCH, TOKENS = 1, 6
Stub = worker_pb2_grpc.WorkerStub


class Workers:
    """Both workers of an island that serves adapters."""

    def __init__(self, island: islands.Island, stubs: Sequence[Stub]) -> None:
        self.island = island
        self.prefill, self.decode = stubs

    def load(self, name: str, folder: Path) -> bytes:
        """Loads an adapter into both workers. Returns the digest."""
        request = worker_pb2.LoadAdapterRequest(epoch=EPOCH, name=name, path=str(folder))
        loaded = [stub.LoadAdapter(request, timeout=30) for stub in (self.prefill, self.decode)]
        assert loaded[0] == loaded[1]
        return loaded[0].digest

    def remove(self, digest: bytes) -> None:
        for stub in (self.prefill, self.decode):
            assert stub.RemoveAdapter(worker_pb2.RemoveAdapterRequest(epoch=EPOCH, digest=digest), timeout=30).known

    def prepare(
        self, request_id: str, prompt: Sequence[int], digest: bytes, tokens: int = TOKENS, **fields: Any
    ) -> worker_pb2.Reservation:
        ask = worker_pb2.PrepareReceiveRequest(
            request_id=request_id, epoch=EPOCH, prompt=prompt_message(prompt, adapter=digest), max_tokens=tokens
        )
        ask.MergeFrom(worker_pb2.PrepareReceiveRequest(**fields))
        return self.decode.PrepareReceive(ask, timeout=30)

    def send(
        self, request_id: str, prompt: Sequence[int], digest: bytes, reservation: worker_pb2.Reservation, tokens: int
    ) -> worker_pb2.RemoteSendResponse:
        send = worker_pb2.RemoteSendRequest(
            request_id=request_id,
            epoch=EPOCH,
            prompt=prompt_message(prompt, adapter=digest),
            sampling=sampling(tokens),
            reservation=reservation,
        )
        return self.prefill.RemoteSend(send, timeout=30)

    def start(self, request_id: str, reservation: worker_pb2.Reservation, tokens: int = TOKENS) -> Any:
        start = worker_pb2.StartGenerateRequest(
            request_id=request_id, epoch=EPOCH, reservation_id=reservation.reservation_id, sampling=sampling(tokens)
        )
        return self.decode.StartGenerate(start, timeout=60)

    def generate(self, request_id: str, prompt: Sequence[int], digest: bytes, tokens: int = TOKENS) -> list[int]:
        reservation = self.prepare(request_id, prompt, digest, tokens)
        first = self.send(request_id, prompt, digest, reservation, tokens).first_token
        return [
            first,
            *(token for message in self.start(request_id, reservation, tokens) for token in message.token_ids),
        ]

    def info(self, stub: Stub) -> inference_pb2.WorkerInfo:
        return stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=30)


def sampling(tokens: int) -> inference_pb2.SamplingParams:
    return inference_pb2.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, seed=1)


@contextmanager
def serving(model: Path, adapters: AdapterSettings, overrides: dict[str, Any] | None = None) -> Iterator[Workers]:
    """overrides: of running_island."""
    made = islands.worker_configs
    settings = {"island.transport": "tcp", "scheduler.max_batch_tokens": 16, **(overrides or {})}
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(
            islands, "worker_configs", lambda *given: [replace(one, adapters=adapters) for one in made(*given)]
        )
        island = stack.enter_context(islands.running_island(model, settings))
        leaders = [one for one in island.workers if one.config.rank == 0]
        channels = [stack.enter_context(grpc.insecure_channel(one.address)) for one in leaders]
        yield Workers(island, [authorized(Stub(channel), leaders[0].config.token) for channel in channels])


def expected(
    model: Any, folder: Path | None, prompt: Sequence[int], tokens: int = TOKENS, *, peft: bool = False
) -> list[int]:
    """Returns the expected tokens. peft: by PEFT, else with the adapter merged into the weights."""
    with (by_peft if peft else merged)(model, folder) as adapted:
        return greedy(adapted, prompt, tokens)
