"""The look at a message's bytes: it stops where it should, and finds what a parser would."""

import random
from typing import Any

import pytest
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from tandem.proto import inference_pb2, worker_pb2
from tandem.workers.service.well_formed import kinds
from tandem.workers.service.wire_look import MAX_NUMBERS, MAX_PARTS, SLICE_PARTS, Malformed, layout_of, look
from tests.fuzz.mutations import mutate_field, mutated_bytes, varint

MANY = 1_000_000
METHODS = ("Inference/Generate", "Worker/RemoteSend", "Worker/PrepareReceive", "Worker/StartGenerate", "Admin/Scale")
GENERATE = layout_of(inference_pb2.GenerateRequest.DESCRIPTOR)


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def seen(data: bytes) -> tuple[int, str]:
    """How many slices were looked at, and what was said of them."""
    slices = 0
    try:
        for _ in look(data, GENERATE):
            slices += 1
    except Malformed as error:
        return slices, str(error)
    return slices, ""


@pytest.mark.parametrize(
    "data",
    [
        field(4, b"\x0a\x00" * MANY),
        b"\x22\x00" * MANY,
        field(3, b"\x08\x01" * MANY),
        field(5, b"\x42\x00" * MANY),
        field(6, b"\x08\x01" * MANY),
    ],
    ids=["messages of a chat", "chats", "ids", "stop strings", "resumed ids"],
)
def test_looks_at_no_more_parts_than_are_accepted(data: bytes) -> None:
    slices, error = seen(data)
    assert slices <= MAX_PARTS // SLICE_PARTS
    assert error.startswith(f"the message and its parts have more than {MAX_PARTS} fields")


def test_stops_at_the_first_unknown_field() -> None:
    assert seen(b"\x98\x06\x01" * MANY)[0] == 0
    slices, error = seen(field(4, field(1, b"\x98\x06\x01") + field(1, b"") * (2 * SLICE_PARTS)))
    assert (slices, error) == (0, "chat.messages has unknown field number 99; this version knows role, content, fields")


def test_as_many_parts_as_are_accepted() -> None:
    message = inference_pb2.GenerateRequest()
    message.chat.messages.extend([inference_pb2.ChatMessage(role="user", content="x")] * 16_384)
    assert seen(message.SerializeToString())[1] == ""


@pytest.mark.parametrize("number", [1, 300], ids=["one byte each", "two bytes each"])
def test_counts_packed_numbers(number: int) -> None:
    def packed(count: int) -> bytes:
        return field(3, field(1, varint(number) * count))

    assert seen(packed(MAX_NUMBERS)) == (0, "")
    assert seen(packed(MAX_NUMBERS + 1))[1].startswith(f"token_ids.ids has more than {MAX_NUMBERS} numbers, the most")


def unknown(message: Message) -> bool:
    """Whether a parsed message, or one in it, has an unknown field."""
    inner: list[Any] = []
    for each, value in message.ListFields():
        if each.message_type is not None and not each.message_type.GetOptions().map_entry:
            inner += value if each.is_repeated else [value]
    return len(UnknownFieldSet(message)) > 0 or any(map(unknown, inner))


def forgets(kind: Any, where: str) -> bool:
    """Whether the parser drops what it has read there: a oneof's last field counts, and a map's entries are bare."""
    alternatives = {field.name for one in kind.oneofs for field in one.fields}
    return where.partition(".")[0] in alternatives or where.endswith(".logit_bias")


@pytest.mark.parametrize("seed", range(20))
def test_finds_what_the_parser_would(seed: int) -> None:
    """The look refuses all messages that parse with unknown fields, and nothing else."""
    rng = random.Random(seed)
    outcomes = set()
    for _ in range(200):
        kind, layout = kinds()[f"/tandem.v1.{rng.choice(METHODS)}"]
        message = kind()
        for _ in range(4):
            mutate_field(rng, message)
        data = message.SerializeToString()
        data = mutated_bytes(rng, data) if rng.random() < 0.7 else data
        try:
            refused, where = False, ""
            list(look(data, layout))
        except Malformed as error:
            refused, where = "unknown" in str(error), str(error).partition(" has")[0]
        try:
            expected = unknown(kind.FromString(data))
        except DecodeError:
            outcomes.add("no message")
            continue
        if refused and not expected and forgets(kind.DESCRIPTOR, where):
            continue
        assert refused == expected, data
        outcomes.add("unknown" if expected else "known")
    assert outcomes == {"no message", "unknown", "known"}


def test_every_method_is_known() -> None:
    assert kinds()["/tandem.v1.Worker/RemoteSend"][0] is worker_pb2.RemoteSendRequest
    assert kinds()["/tandem.v1.Inference/Generate"][0] is inference_pb2.GenerateRequest
