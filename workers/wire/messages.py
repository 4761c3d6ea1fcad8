"""Converts between protobuf messages and the values that the loops work with."""

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from tandem.cache.plan.arrays import Int64Array
from tandem.cache.plan.spans import Sliding
from tandem.proto import inference_pb2, worker_pb2
from tandem.transfer.wire_map import WireMap
from tandem.workers.errors import InvalidCall
from tandem.workers.sampling.guided import Guided
from tandem.workers.sampling.sampling_params import SamplingParams, SlidingWindow
from tandem.workers.sampling.thinking import Thinking
from tandem.workers.wire.prompt_spec import PromptSpec
from tandem.workers.wire.reservation import Reservation
from tandem.workers.wire.seal import is_sealed, seal

if TYPE_CHECKING:  # as in wire_map
    from tandem.workers.sampling.token_logprobs import TokenLogprobs

WOULD_PARK_KEY = "tandem-would-park"
NO_SLOT_KEY = "tandem-no-slot"
"""Metadata of a refused PrepareReceive: with `parks`, running requests would give room up for it."""
QUEUED_KEY = "tandem-queued"
"""Initial metadata of ReadPrompts. It comes once the worker has the prompts, and stays known if the worker dies."""
PROMPT_DTYPE = np.dtype("<u4")
RESERVATION_NUMBERS = {field.name for field in fields(Reservation)} - {"wire_map", "authentic"}
"""Fields that Reservation and its message have alike."""


def prompt_to_bytes(token_ids: Sequence[int] | Int64Array) -> bytes:
    """Packs the token ids of a message."""
    return np.asarray(token_ids, PROMPT_DTYPE).tobytes()


def prompt_to_proto(prompt: PromptSpec) -> worker_pb2.PromptSpec:
    return worker_pb2.PromptSpec(
        token_ids=prompt_to_bytes(prompt.token_ids),
        salt=prompt.salt,
        encoder_tokens=prompt.encoder.length,
        sliding=sliding_to_proto(prompt.sliding),
        whole=prompt.whole,
        num_output=prompt.num_output,
        priority=prompt.priority,
        adapter=prompt.adapter,
    )


def prompt_from_bytes(prompt: bytes, field: str = "prompt") -> Int64Array:
    """The token ids of such a field, int64 [n]; InvalidCall when they are none, or no whole number."""
    if not prompt or len(prompt) % PROMPT_DTYPE.itemsize:
        raise InvalidCall(
            f"{field} has {len(prompt)} bytes; it must have one token id or more, of {PROMPT_DTYPE.itemsize} bytes each"
        )
    return np.frombuffer(prompt, PROMPT_DTYPE).astype(np.int64)


def sampling_from_proto(message: inference_pb2.SamplingParams) -> SamplingParams:
    """Both have fields of the same names. Unset ones take the defaults of SamplingParams; nothing is validated here."""
    given: dict[str, Any] = {
        field.name: tuple(value) if field.is_repeated else value for field, value in message.ListFields()
    }
    if message.logit_bias:
        given["logit_bias"] = tuple(sorted(message.logit_bias.items()))
    if message.bad_words_ids:
        given["bad_words_ids"] = tuple(tuple(word.ids) for word in message.bad_words_ids)
    given.pop("guided", None)
    if message.HasField("guided"):
        given["guided"] = _guided(message.guided)
    given.pop("sliding", None)
    if message.HasField("sliding"):
        given["sliding"] = sliding_from_proto(message.sliding)
    return SamplingParams(**given)


def sliding_from_proto(message: inference_pb2.SlidingWindow) -> SlidingWindow:
    """Converts a window. Nothing is validated here."""
    return SlidingWindow(message.window, message.sinks)


def sliding_to_proto(sliding: SlidingWindow | None) -> inference_pb2.SlidingWindow | None:
    return None if sliding is None else inference_pb2.SlidingWindow(window=sliding.window, sinks=sliding.sinks)


def sampling_to_proto(params: SamplingParams) -> inference_pb2.SamplingParams:
    given: dict[str, Any] = {name: value for name, value in vars(params).items() if value is not None}
    given["logit_bias"] = dict(params.logit_bias)
    given["bad_words_ids"] = [inference_pb2.TokenIds(ids=word) for word in params.bad_words_ids]
    given["sliding"] = sliding_to_proto(params.sliding)
    if params.guided is not None:
        kind, texts = params.guided.kind, params.guided.texts
        value = inference_pb2.Choice(texts=texts) if kind == "choice" else texts[0]
        given["guided"] = inference_pb2.Guided(**{kind: value})  # type: ignore[arg-type]  # by their names
        thinking, most = params.guided.thinking, params.guided.thinking_tokens
        if thinking is not None:
            given["guided"].thinking.CopyFrom(inference_pb2.Thinking(**vars(thinking), max_tokens=most))
    return inference_pb2.SamplingParams(**given)


def _guided(message: inference_pb2.Guided) -> Guided | None:
    kind = message.WhichOneof("kind")
    if kind is None:
        return None
    texts = tuple(message.choice.texts) if kind == "choice" else (getattr(message, kind),)
    if not message.HasField("thinking"):
        return Guided(kind, texts)
    said = message.thinking
    return Guided(kind, texts, Thinking(said.begin, said.end, said.opened), said.max_tokens)


def reservation_to_proto(reservation: Reservation, token: str) -> worker_pb2.Reservation:
    """token: the island's, by which the message is sealed."""
    wire = reservation.wire_map
    numbers = {name: getattr(reservation, name) for name in RESERVATION_NUMBERS}
    position_map = None if wire is None else _map_to_proto(wire)
    message = worker_pb2.Reservation(**numbers, position_map=position_map)
    seal(message, token)
    return message


def reservation_from_proto(message: worker_pb2.Reservation, token: str) -> Reservation:
    """token: the island's. Nothing is refused here: the loop that uses the reservation does."""
    wire_map = _wire_map(message.position_map) if message.HasField("position_map") else None
    numbers: dict[str, Any] = {name: getattr(message, name) for name in RESERVATION_NUMBERS}
    return Reservation(**numbers, wire_map=wire_map, authentic=is_sealed(message, token))


def _map_to_proto(wire: WireMap) -> worker_pb2.PositionMap:
    slides = None if wire.sliding is None else worker_pb2.Sliding(**wire.sliding._asdict())
    fields: dict[str, Any] = {**vars(wire), "sliding": slides}
    return worker_pb2.PositionMap(**fields)


def _wire_map(message: worker_pb2.PositionMap) -> WireMap:
    of_map: dict[str, Any] = {field.name: getattr(message, field.name) for field in fields(WireMap)}
    of_map["runs"] = tuple(of_map["runs"])
    slides = message.sliding
    of_map["sliding"] = None
    if message.HasField("sliding"):
        of_map["sliding"] = Sliding(slides.window, slides.sink, slides.evict_after, slides.rotated)
    return WireMap(**of_map)


def logprobs_to_proto(logprobs: "TokenLogprobs") -> inference_pb2.TokenLogprobs:
    return inference_pb2.TokenLogprobs(
        chosen=inference_pb2.TokenLogprob(token_id=logprobs.token_id, logprob=logprobs.logprob),
        top=[inference_pb2.TokenLogprob(token_id=token, logprob=value) for token, value in logprobs.top],
    )
