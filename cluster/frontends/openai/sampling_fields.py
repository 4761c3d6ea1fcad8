"""The sampling parameters of a body, as the protocol has them."""

from typing import TYPE_CHECKING, Annotated, Any

from google.protobuf.descriptor import FieldDescriptor
from pydantic import FailFast, Field, create_model
from typing_extensions import TypeAliasType

from tandem.cluster.frontends.openai.body_object import BodyObject
from tandem.cluster.protocol import accepted_value
from tandem.proto import inference_pb2

MAX_LISTED = 1024  # of a sampling parameter; the request validator has limits of its own

# Only the first fault of a list is found, or a body of a few megabytes would make gigabytes of findings.
StopTexts = TypeAliasType("StopTexts", Annotated[list[str], FailFast(), Field(max_length=MAX_LISTED)])
StopIds = TypeAliasType("StopIds", Annotated[list[int], FailFast(), Field(max_length=MAX_LISTED)])


def _sampling_field(field: FieldDescriptor) -> tuple[Any, Any]:
    """Returns type and default of the sampling parameter that a protobuf field holds."""
    kind: Any = type(field.default_value)
    accepted = accepted_value(field.name)
    if field.is_repeated and field.type == FieldDescriptor.TYPE_STRING:
        kind, accepted = str | StopTexts, "text, or a list of texts"
    elif field.is_repeated:
        kind, accepted = StopIds, "a list of token ids"
    return kind | None, Field(default=None, description=accepted)


SAMPLING = [field for field in inference_pb2.SamplingParams.DESCRIPTOR.fields if field.message_type is None]
"""Sampling parameters of the protocol that are numbers or texts, or lists of them."""

OF_SEVERAL = ("max_tokens", "n", "best_of", "logprobs", "prompt_logprobs")
ONE_ANSWER = [field for field in SAMPLING if field.name not in OF_SEVERAL]
"""The sampling fields of APIs whose calls have one answer, and which name length and log-probabilities otherwise."""

if TYPE_CHECKING:

    class SamplingFields(BodyObject):
        skip_special_tokens: bool | None

    OneAnswerFields = SamplingFields
else:
    SamplingFields, OneAnswerFields = (
        create_model(name, __base__=BodyObject, **{field.name: _sampling_field(field) for field in fields})
        for name, fields in (("SamplingFields", SAMPLING), ("OneAnswerFields", ONE_ANSWER))
    )
