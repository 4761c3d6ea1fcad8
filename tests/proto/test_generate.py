import pytest

from tandem.proto import generate, inference_pb2, worker_pb2


@pytest.fixture(scope="module")
def generated() -> dict[str, str]:
    return generate.generate()


def test_generated_modules_are_up_to_date(generated: dict[str, str]) -> None:
    assert generate.outdated(generated) == []


def test_a_changed_missing_or_stray_module_is_noticed(generated: dict[str, str]) -> None:
    changed = generated | {"worker_pb2.py": generated["worker_pb2.py"] + "\n"}
    assert generate.outdated(changed) == ["worker_pb2.py"]
    assert generate.outdated(generated | {"new_pb2.pyi": ""}) == ["new_pb2.pyi"]
    assert generate.outdated({name: text for name, text in generated.items() if name != "inference_pb2_grpc.py"}) == [
        "inference_pb2_grpc.py"
    ]


def test_messages_are_in_one_package() -> None:
    assert inference_pb2.GenerateRequest.DESCRIPTOR.full_name == "tandem.v1.GenerateRequest"
    assert worker_pb2.RemoteSendRequest.DESCRIPTOR.fields_by_name["sampling"].message_type is (
        inference_pb2.SamplingParams.DESCRIPTOR
    )


def test_absent_sampling_values_differ_from_zero() -> None:
    sampling = inference_pb2.SamplingParams(temperature=0)
    assert sampling.HasField("temperature")
    assert not sampling.HasField("max_tokens")
