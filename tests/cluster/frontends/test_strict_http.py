"""Tests that StrictHttp sends what h11 sends."""

import h11
import pytest

from tandem.cluster.frontends.http.reply import EVENTS
from tandem.cluster.frontends.http.strict_http import StrictHttp

REQUEST = "GET / HTTP/{}\r\nhost: localhost\r\n\r\n"
PARTS = (b"data: a\n\n", b"", b"x" * 70_000)


def sent(http: h11.Connection, version: str, headers: list[tuple[str, str]]) -> bytes:
    http.receive_data(REQUEST.format(version).encode())
    while not isinstance(http.next_event(), h11.EndOfMessage):
        pass
    parts = [h11.Data(data=part) for part in PARTS]
    events = (h11.Response(status_code=200, headers=headers), *parts, h11.EndOfMessage())
    return b"".join(http.send(event) or b"" for event in events)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("length", [[], [("content-length", str(sum(map(len, PARTS))))]], ids=["events", "whole"])
def test_events_are_framed_as_h11_frames_them(version: str, length: list[tuple[str, str]]) -> None:
    headers = [("content-type", EVENTS), *length]
    ours = sent(StrictHttp(h11.SERVER), version, headers)
    assert ours == sent(h11.Connection(h11.SERVER), version, headers)


def test_nothing_is_sent_behind_the_end_of_an_answer() -> None:
    http = StrictHttp(h11.SERVER)
    sent(http, "1.1", [("content-type", EVENTS)])
    with pytest.raises(h11.LocalProtocolError):
        http.send(h11.Data(data=b"more"))
