"""Tests what tools and programs read over gRPC: services by reflection, and details of errors."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.rpc import error_details_pb2, status_pb2
from grpc_reflection.v1alpha import reflection_pb2

from tandem.cluster.client import Client
from tandem.cluster.errors import Superseded
from tandem.cluster.errors.details import details_of, field_of, reason_of
from tandem.proto import inference_pb2, inference_pb2_grpc
from tests.cluster.open_gateway import PROMPT, OpenGateway, open_gateway
from tests.support.checkpoints import save_checkpoint
from tests.support.waiting import until

V1 = "grpc.reflection.v1.ServerReflection"
ALPHA = "grpc.reflection.v1alpha.ServerReflection"
INFERENCE = "tandem.v1.Inference"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("grpc"))


@pytest.fixture(scope="module")
def opened(model: Path) -> Iterator[OpenGateway]:
    with open_gateway(model) as gateway:
        yield gateway


def reflect(address: str, service: str, **asked: Any) -> Any:
    with grpc.insecure_channel(address) as channel:
        call: Any = channel.stream_stream(
            f"/{service}/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        (answer,) = call(iter([reflection_pb2.ServerReflectionRequest(**asked)]), timeout=60)
    return answer


@pytest.mark.parametrize("service", [V1, ALPHA])
def test_both_reflections_describe_each_service_that_they_list(opened: OpenGateway, service: str) -> None:
    listed = reflect(opened.grpc, service, list_services="").list_services_response.service
    assert {INFERENCE, "tandem.v1.Admin", V1, ALPHA} < {one.name for one in listed}
    for one in listed:
        described = reflect(opened.grpc, service, file_containing_symbol=one.name).file_descriptor_response
        file = FileDescriptorProto.FromString(described.file_descriptor_proto[0])
        assert one.name in [f"{file.package}.{held.name}" for held in file.service]
        again = reflect(opened.grpc, service, file_by_filename=file.name).file_descriptor_response
        assert again.file_descriptor_proto[0] == described.file_descriptor_proto[0]
    unknown = reflect(opened.grpc, service, file_containing_symbol="tandem.v1.Nothing").error_response
    assert unknown.error_code == grpc.StatusCode.NOT_FOUND.value[0]


def failure(address: str, request: inference_pb2.GenerateRequest) -> grpc.RpcError:
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as caught:
        list(inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=60))
    return caught.value


def details(error: Any) -> dict[str, Any]:
    """Returns the details by the names of their messages. Code and text are those that gRPC carries itself."""
    (packed,) = [value for key, value in error.trailing_metadata() if key == "grpc-status-details-bin"]
    status = status_pb2.Status.FromString(packed)
    assert (status.code, status.message) == (error.code().value[0], error.details())
    found: dict[str, Any] = {}
    for one in status.details:
        name = one.TypeName().rpartition(".")[2]
        found[name] = getattr(error_details_pb2, name)()
        assert one.Unpack(found[name])
    return found


def request(**sampling: Any) -> inference_pb2.GenerateRequest:
    ids = inference_pb2.TokenIds(ids=PROMPT)
    return inference_pb2.GenerateRequest(token_ids=ids, sampling=inference_pb2.SamplingParams(**sampling))


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (request(top_p=2.0), "sampling.top_p"),
        (request(logit_bias={5: 1000.0}), "sampling.logit_bias[5]"),
        (inference_pb2.GenerateRequest(), "input"),
        (inference_pb2.GenerateRequest(text="Hello"), "text"),
        (inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[5, 1 << 30])), "token_ids.ids[1]"),
        (inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[5] * 256)), "input"),
    ],
)
def test_a_bad_request_names_its_field(opened: OpenGateway, wrong: Any, field: str) -> None:
    error = failure(opened.grpc, wrong)
    held = details(error)
    (violation,) = held["BadRequest"].field_violations
    assert violation.field == field
    assert violation.description == error.details()
    assert (held["ErrorInfo"].reason, held["ErrorInfo"].domain) == ("INVALID_REQUEST", "tandem")
    assert "RetryInfo" not in held


def test_a_full_queue_says_when_to_come_again(model: Path) -> None:
    with open_gateway(model, {"gateway.max_queued": 1}, alone=True) as opened, ThreadPoolExecutor(1) as pool:
        with Client(opened.grpc) as client:
            waiting = pool.submit(list, client.generate(PROMPT, max_tokens=2))
            until(lambda: opened.gateway._router.queued == 1)
            error: Any = failure(opened.grpc, request())
            opened.island_comes()
            assert waiting.result(60)
        held = details(error)
        assert held["ErrorInfo"].reason == "OVERLOADED"
        advised = int(dict(error.trailing_metadata())["retry-after-ms"])
        assert 0 < held["RetryInfo"].retry_delay.ToMilliseconds() <= advised


def test_clients_tell_errors_of_one_status_apart(model: Path) -> None:
    """ABORTED is also the status of workers that were lost too often."""
    with open_gateway(model, alone=True) as opened, ThreadPoolExecutor(1) as pool, Client(opened.grpc) as client:
        first = pool.submit(list, client.generate(PROMPT, request_id="one", max_tokens=2))
        until(lambda: opened.running == 1)
        later = request(max_tokens=2)
        later.request_id, later.resume.token_ids[:] = "one", []
        later.resume.SetInParent()
        with grpc.insecure_channel(opened.grpc) as channel:
            call: Any = inference_pb2_grpc.InferenceStub(channel).Generate(later, timeout=60)
            with pytest.raises(Superseded):
                first.result(60)
            call.cancel()


@pytest.mark.parametrize("text", ["", "the call has no request", "metrics.enabled is false", "sampling", "Sampling x"])
def test_no_field_is_made_up(text: str) -> None:
    assert field_of(text) in ("", text)


def test_long_texts_leave_room_for_what_clients_take() -> None:
    """Clients take 8 KiB of trailing metadata: the text, of which each byte may become three, and details in base64."""
    for text in ("é" * 500, "x" * 1000, "語" * 500):
        held = details_of(3, f"text {text}", "INVALID_REQUEST", is_invalid=True)
        size = 3 * len(text.encode()) + sum(len(value) * 4 // 3 for _, value in held)
        assert size < 7500
        assert held or text[0] == "語"


@pytest.mark.parametrize("packed", [b"\xff", b"", status_pb2.Status(code=3).SerializeToString()])
def test_details_of_others_are_no_reason(packed: bytes) -> None:
    assert reason_of((("grpc-status-details-bin", packed),)) == ""
