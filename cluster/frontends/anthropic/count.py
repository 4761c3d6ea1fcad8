"""/v1/messages/count_tokens: its body."""

from tandem.cluster.frontends.anthropic.body import ChatLikeBody
from tandem.cluster.frontends.openai.read_body import read_object
from tandem.cluster.frontends.openai.tokenization import check_model
from tandem.proto import inference_pb2


class CountBody(ChatLikeBody):
    """POST /v1/messages/count_tokens."""


def read_count(data: bytes | bytearray, names: tuple[str, ...]) -> inference_pb2.GenerateRequest:
    """Returns a request with the body's prompt. names: of the model. Raises HttpError."""
    body, _ = read_object(CountBody, data)
    check_model(body.model, names)
    (request,) = body.requests()
    return request
