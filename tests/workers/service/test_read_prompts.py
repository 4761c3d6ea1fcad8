"""Worker/ReadPrompts: what it refuses, and that its prompts wait for room as others do."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from tandem.proto import worker_pb2, worker_pb2_grpc
from tandem.workers.ports.authentication import authorized
from tandem.workers.wire.messages import QUEUED_KEY, prompt_to_bytes
from tests.support.checkpoints import save_checkpoint
from tests.support.embedding_models import loop_of
from tests.support.island import Island, running_island
from tests.support.oracle import random_prompt
from tests.support.waiting import until

PROMPT = worker_pb2.PromptSpec(token_ids=prompt_to_bytes([3, 4]))


@pytest.fixture(scope="module")
def island(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Island]:
    folder: Path = save_checkpoint("llama", tmp_path_factory.mktemp("read"))
    with running_island(folder, {"cache.num_pages": 40}) as island:
        yield island


@pytest.fixture(scope="module")
def stub(island: Island) -> Iterator[Any]:
    link = next(iter(island.gateway._islands.links().values()))
    with grpc.insecure_channel(link.worker.address) as channel:
        yield authorized(worker_pb2_grpc.WorkerStub(channel), link.worker.token)


def ask(stub: Any, island: Island, **fields: Any) -> worker_pb2.ReadPromptsResponse:
    given: dict[str, Any] = {
        "request_id": "read",
        "epoch": island.workers[0].config.epoch,
        "prompts": [PROMPT],
        **fields,
    }
    return stub.ReadPrompts(worker_pb2.ReadPromptsRequest(**given), timeout=60)


@pytest.mark.parametrize(
    ("fields", "code", "named"),
    [
        ({"prompts": []}, "INVALID_ARGUMENT", "prompts has 0 entries"),
        ({"prompts": [PROMPT] * 257}, "INVALID_ARGUMENT", "prompts has 257 entries"),
        ({"prompts": [worker_pb2.PromptSpec(token_ids=b"abc")]}, "INVALID_ARGUMENT", "3 bytes"),
        ({"prompts": [worker_pb2.PromptSpec(token_ids=prompt_to_bytes([199]))]}, "INVALID_ARGUMENT", "token 199"),
        ({"skipped": 3}, "INVALID_ARGUMENT", "skipped 3"),
        ({"mean": True, "skipped": 2}, "INVALID_ARGUMENT", "skipped is 2"),
        ({"mean": True, "token_ids": [1]}, "INVALID_ARGUMENT", "mean is True"),
        ({"token_ids": [199]}, "INVALID_ARGUMENT", "token_ids has 199"),
        ({"token_ids": list(range(65))}, "INVALID_ARGUMENT", "token_ids has 65 entries"),
        ({"epoch": 99}, "FAILED_PRECONDITION", "epoch is 99"),
    ],
)
def test_what_is_refused(island: Island, stub: Any, fields: dict[str, Any], code: str, named: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        ask(stub, island, **fields)
    assert caught.value.code().name == code
    assert named in str(caught.value.details())
    until(lambda: island.workers[0].cache.pages.free == island.workers[0].cache.pages.total)


def test_more_prompts_than_pages_wait_for_each_other(island: Island, stub: Any) -> None:
    """40 pages of 8 positions hold two such prompts at a time."""
    prompts = [random_prompt(140, seed=number) for number in range(6)]
    alone = [ask(stub, island, prompts=[worker_pb2.PromptSpec(token_ids=prompt_to_bytes(one))]) for one in prompts]
    together = ask(stub, island, prompts=[worker_pb2.PromptSpec(token_ids=prompt_to_bytes(one)) for one in prompts])
    expected = np.concatenate([np.frombuffer(one.values, "<f4") for one in alone])
    np.testing.assert_allclose(np.frombuffer(together.values, "<f4"), expected, rtol=0, atol=1e-5)


def test_a_call_is_told_that_its_prompts_are_queued(island: Island, stub: Any) -> None:
    request = worker_pb2.ReadPromptsRequest(request_id="told", epoch=island.workers[0].config.epoch, prompts=[PROMPT])
    call = stub.ReadPrompts.future(request, timeout=60)
    assert (QUEUED_KEY, "1") in list(call.initial_metadata())
    assert call.result().values


def test_a_call_that_ends_gives_its_prompts_up(island: Island, stub: Any) -> None:
    worker = island.workers[0]
    prompts = [
        worker_pb2.PromptSpec(token_ids=prompt_to_bytes(random_prompt(200, seed=number))) for number in range(40)
    ]
    request = worker_pb2.ReadPromptsRequest(request_id="gone", epoch=worker.config.epoch, prompts=prompts)
    call = stub.ReadPrompts.future(request, timeout=60)
    before = loop_of(worker).prefills.computed_tokens
    until(lambda: loop_of(worker).prefills.computed_tokens > before)
    call.cancel()
    until(lambda: worker.cache.pages.free == worker.cache.pages.total and not loop_of(worker).num_waiting)
    assert loop_of(worker).prefills.computed_tokens < before + 40 * 200
