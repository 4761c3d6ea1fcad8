"""Frames of a client against a reader that takes them one by one."""

import random

import pytest

from tandem.workers.ports.client_frames import PREFACE, ClientFrames, NotHttp2, Passed

DATA, HEADERS, RESET, PING, CONTINUATION = 0, 1, 3, 6, 9
MANY = 1000


def frame(kind: int, stream: int = 0, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, 0)) + stream.to_bytes(4, "big") + payload


def call(number: int) -> bytes:
    return frame(HEADERS, 2 * number + 1, b"path") + frame(DATA, 2 * number + 1, bytes(100))


def begun(*contents: bytes) -> ClientFrames:
    frames = ClientFrames()
    for content in (PREFACE, *contents):
        frames.add(content)
    return frames


def counts(passed: Passed) -> tuple[int, int, int]:
    return passed.calls, passed.resets, passed.small


def test_nothing_is_passed_on_before_the_preface() -> None:
    frames = ClientFrames()
    frames.add(PREFACE[:10])
    assert not frames.take(MANY, MANY).content
    assert not frames.begun
    frames.add(PREFACE[10:] + frame(PING, 0, bytes(8)))
    assert frames.begun
    assert frames.take(MANY, MANY).content == PREFACE + frame(PING, 0, bytes(8))


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n", PREFACE[:-1] + b"x", b"\x16\x03\x01"])
def test_another_protocol_is_refused(said: bytes) -> None:
    with pytest.raises(NotHttp2):
        ClientFrames().add(said)


def test_a_new_call_waits_and_what_is_before_it_does_not() -> None:
    frames = begun(call(0), call(1), call(2))
    passed = frames.take(MANY, 2)
    assert (passed.content, passed.blocked) == (PREFACE + call(0) + call(1), True)
    passed = frames.take(MANY, 0)
    assert (passed.content, passed.blocked) == (b"", True)
    passed = frames.take(MANY, 1)
    assert (passed.content, passed.blocked, frames.held) == (call(2), False, 0)


def test_second_headers_of_a_stream_are_no_call() -> None:
    passed = begun(call(3), frame(HEADERS, 7, b"trailers"), frame(HEADERS, 5, b"old")).take(MANY, MANY)
    assert counts(passed) == (1, 0, 0)


def test_no_more_frames_than_asked_for() -> None:
    pings = [frame(PING, 0, bytes(8))] * 10
    frames = begun(*pings)
    passed = frames.take(4, 0)
    assert (passed.content, passed.more, passed.small) == (PREFACE + b"".join(pings[:4]), True, 4)
    passed = frames.take(6, 0)
    assert (passed.more, frames.held) == (False, 0)


def test_small_frames_are_counted() -> None:
    sent = [call(0), frame(RESET, 1, bytes(4)), frame(DATA, 1), frame(CONTINUATION, 1, b"x"), frame(0xFA)]
    assert counts(begun(*sent).take(MANY, MANY)) == (1, 1, 4)


def test_a_large_payload_goes_on_as_it_comes() -> None:
    content = frame(DATA, 1, bytes(16384))
    frames = begun(content[:1000])
    assert frames.take(MANY, 0).content == PREFACE + content[:1000]
    frames.add(content[1000:] + frame(PING, 0, bytes(8))[:5])
    assert frames.take(0, 0).content == content[1000:]
    assert frames.held == 5


@pytest.mark.parametrize("seed", range(20))
def test_any_cuts_and_any_bounds_pass_the_same_bytes_on(seed: int) -> None:
    draw = random.Random(seed)
    kinds = [frame(PING, 0, bytes(8)), frame(RESET, 1, bytes(4)), frame(DATA, 1), frame(DATA, 1, bytes(70))]
    sent = [call(number) if draw.random() < 0.4 else draw.choice(kinds) for number in range(60)]
    content = b"".join([PREFACE, *sent])
    ends = sorted({*draw.choices(range(len(content)), k=30), len(content)})
    frames, passed, calls = ClientFrames(), b"", 0
    starts = {sum(map(len, [PREFACE, *sent[:number]])) for number, one in enumerate(sent) if one[3] == HEADERS}
    for begin, end in zip([0, *ends], ends, strict=False):
        frames.add(content[begin:end])
        while True:
            most = draw.randrange(3)
            taken = frames.take(draw.randrange(1, 5), most)
            assert taken.calls <= most
            assert not taken.blocked or len(passed) + len(taken.content) in starts
            passed, calls = passed + taken.content, calls + taken.calls
            if not (taken.more or taken.blocked):
                break
        assert end - len(passed) < 9 or end < len(PREFACE)  # no more than a part of a frame's head is held
    assert passed == content
    assert calls == len(starts)
