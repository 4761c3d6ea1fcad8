"""HTTP/1.1 as h11 parses it, with bounds for what h11 would take."""

import re
from typing import Any

import h11

from tandem.cluster.frontends.http.reply import EVENTS

LENGTH, CODING, CLOSE = b"content-length", b"transfer-encoding", (b"connection", b"close")
MOST_HEAD = 16 << 10  # bytes of a request's head
MOST_LINE = 4 << 10  # bytes of its first line, whose path is unescaped
MOST_LINES = 128  # of a request's head
MOST_FRAMING = 512  # bytes of one chunk's size and extensions, or of all trailers
MOST_UNREAD = 1 << 16  # bytes of a body that are read behind an early answer, so that the connection stays
NOT_IN_A_HEADER = re.compile(rb"[\x00\v\f]|\r(?!\n)")  # h11 takes a second to find one behind 16,000 spaces


class StrictHttp(h11.Connection):
    """Takes no request whose end two readers could see at two places (RFC 9112, 6.1): a proxy may be one such reader.

    A head is fed as a whole, and nothing else with it. So each call of next_event() has a bounded cost.
    """

    refusal = "the request is not HTTP/1.1"
    is_broken = False  # whether next_event() has raised
    sends_events = False  # whether the answer is a stream of events,
    _sends_chunks = False  # and comes in chunks
    events = 0  # that have come since the owner last set this to 0
    body_bytes = 0  # of the request's body on the wire so far: sizes of chunks and all
    _silent = 0  # bytes that have come since the last event

    def receive_data(self, data: bytes) -> None:
        self._silent += len(data)
        self.body_bytes += len(data)
        super().receive_data(data)

    def next_event(self) -> Any:
        """Returns h11's next event. Raises RemoteProtocolError, sometimes where h11 would not; `refusal` then says
        why."""
        try:
            if self.their_state is h11.IDLE:
                self._check_head(self.trailing_data[0])
            event = super().next_event()
            if event is h11.NEED_DATA:
                self._check_framing()
            elif event is not h11.PAUSED:
                self.events += 1
                self._silent = 0
            if isinstance(event, h11.Request):
                self._check_ends(event)
                self.body_bytes = 0
        except h11.RemoteProtocolError as error:
            self.refusal, self.is_broken = str(error), True
            raise
        return event

    def send(self, event: h11.Event) -> Any:
        """Sends as h11 does. Chunks of events, the most frequent case, are written here."""
        if isinstance(event, h11.Data) and event.data and self._sends_chunks and self.our_state is h11.SEND_BODY:
            return b"%x\r\n%b\r\n" % (len(event.data), event.data)
        if isinstance(event, h11.Response):
            headers = dict(event.headers)
            self.sends_events = EVENTS.encode() in headers.values()
            self._sends_chunks = self.sends_events and LENGTH not in headers and self.their_http_version == b"1.1"
            if self.their_state is h11.SEND_BODY and not self._is_nearly_read:
                closing = [*(header for header in event.headers if header != CLOSE), CLOSE]
                event = h11.Response(status_code=event.status_code, headers=closing, reason=event.reason)
        return super().send(event)

    @property
    def content_left(self) -> int:
        """Returns how many of the next bytes are surely the body's content. 0 if framing comes next."""
        if self.their_state is not h11.SEND_BODY:
            return 0
        # h11's readers of bodies count these bytes. If a reader does not tell, bodies come in small pieces.
        return getattr(self._reader, "_remaining", 0) or getattr(self._reader, "_bytes_in_chunk", 0)

    @property
    def _is_nearly_read(self) -> bool:
        """Returns whether the end of the body is near, and its client sends it in any case."""
        left = getattr(self._reader, "_remaining", None)
        return left is not None and left <= MOST_UNREAD and not self.they_are_waiting_for_100_continue

    def _check_head(self, head: bytes) -> None:
        if len(head) > MOST_HEAD:
            raise h11.RemoteProtocolError(f"the head has more than {MOST_HEAD} bytes")
        first = head.find(b"\n")
        if first > MOST_LINE:
            raise h11.RemoteProtocolError(f"the request line has {first} bytes; it may have at most {MOST_LINE}")
        lines = head.count(b"\n")
        if lines > MOST_LINES:
            raise h11.RemoteProtocolError(f"the head has {lines} lines; it may have at most {MOST_LINES}")
        wrong = NOT_IN_A_HEADER.search(head, max(0, first))
        if wrong is not None:
            raise h11.RemoteProtocolError(f"illegal header line: it has the byte {wrong[0]!r}")

    def _check_framing(self) -> None:
        if self.their_state is h11.SEND_BODY and self._silent > MOST_FRAMING:
            raise h11.RemoteProtocolError(
                f"a chunk's size with its extensions, or the trailers, have {self._silent} bytes; they may have at "
                f"most {MOST_FRAMING}"
            )

    @staticmethod
    def _check_ends(request: h11.Request) -> None:
        names = {name for name, _ in request.headers}
        if {LENGTH, CODING} <= names:
            raise h11.RemoteProtocolError("content-length and transfer-encoding are both set; set only one")
        if CODING in names and request.http_version < b"1.1":
            raise h11.RemoteProtocolError("transfer-encoding is set; it needs HTTP/1.1 or later")
