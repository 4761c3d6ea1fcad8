"""Requests for embeddings from Python values, and their answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from tandem.cluster.client.client_messages import Timings, Usage, fields_of
from tandem.cluster.errors import InvalidRequest
from tandem.proto import inference_pb2
from tandem.workers.wire.messages import prompt_to_bytes

Input = str | Sequence[int]
Inputs = Input | Sequence[Input]


class EmbedOptions(TypedDict, total=False):
    """The options of EmbedRequest, by its fields' names."""

    dimensions: int
    normalize: bool
    prompt_name: str
    prompt: str
    truncate_prompt_tokens: int
    add_special_tokens: bool
    priority: int
    service_tier: str


@dataclass(frozen=True, eq=False)
class Embeddings:
    """values: float32 [inputs, dimensions], in the order of the inputs."""

    request_id: str
    values: NDArray[np.float32]
    usage: Usage
    timings: Timings


def embed_request(
    inputs: Inputs, options: EmbedOptions, request_id: str | None = None, cache_salt: str | None = None
) -> inference_pb2.EmbedRequest:
    """inputs: a text, a list of token ids, or a list of either. Raises InvalidRequest."""
    unknown = sorted(options.keys() - EmbedOptions.__annotations__.keys())
    if unknown:
        accepted = ", ".join(EmbedOptions.__annotations__)
        raise InvalidRequest(f"{unknown[0]} is no option of embeddings; it must be one of {accepted}")
    try:
        request = inference_pb2.EmbedRequest(request_id=request_id or "", cache_salt=cache_salt or "", **options)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"the request cannot be sent: {error}") from None
    is_one = isinstance(inputs, str) or (len(inputs) > 0 and all(isinstance(one, int | np.integer) for one in inputs))
    many: Any = [inputs] if is_one else inputs
    for index, one in enumerate(many):
        try:
            part: dict[str, Any] = {"text": one} if isinstance(one, str) else {"token_bytes": _token_bytes(one)}
            request.inputs.append(inference_pb2.Prompt(**part))
        except (TypeError, ValueError, OverflowError):
            reason = "it must be text or a list of token ids in [0, 2^32)"
            raise InvalidRequest(f"inputs[{index}] is {one!r:.80}; {reason}") from None
    return request


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    wide = np.asarray(token_ids)
    if wide.ndim != 1 or (wide.size and (wide.dtype.kind not in "iu" or wide.min() < 0 or wide.max() >= 1 << 32)):
        raise ValueError("no token ids")
    return prompt_to_bytes(wide)


def embeddings_of(message: inference_pb2.EmbedResponse, count: int) -> Embeddings:
    """count: of inputs."""
    values = np.frombuffer(message.values, "<f4").reshape(count, message.dimensions).astype(np.float32, copy=False)
    return Embeddings(
        message.request_id, values, Usage(**fields_of(message.usage)), Timings(**fields_of(message.timings))
    )
