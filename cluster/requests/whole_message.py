"""The messages of one answer as one."""

from io import StringIO

from tandem.proto import inference_pb2


class WholeMessage:
    """Takes an answer's messages in order. It holds tokens and text, never the messages: there may be many."""

    def __init__(self) -> None:
        self._message = inference_pb2.GenerateResponse()
        self._text = StringIO(newline="")

    def add(self, message: inference_pb2.GenerateResponse) -> None:
        self._text.write(message.text)
        self._message.MergeFrom(message)

    @property
    def message(self) -> inference_pb2.GenerateResponse:
        """Of all that were added."""
        self._message.text = self._text.getvalue()
        return self._message
