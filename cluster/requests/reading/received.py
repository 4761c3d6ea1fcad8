"""The output that a client has from an earlier call of the request that it resumes."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tandem.cache.plan.arrays import Int64Array
from tandem.cluster.adapters.values import Adapter
from tandem.cluster.errors import AdapterRefused, InvalidRequest
from tandem.proto import inference_pb2
from tandem.workers.sampling.sampling_params import SamplingParams

CheckIds = Callable[[str, Int64Array], None]
"""Raises InvalidRequest for ids that are not in the vocabulary. It gets the field's name and the ids."""


@dataclass(frozen=True)
class Received:
    """The part of one answer that a client has from an earlier call of the same request."""

    token_ids: tuple[int, ...] = ()
    ended: bool = False  # nothing more comes of it


def read_resume(
    message: inference_pb2.GenerateRequest, params: SamplingParams, adapter: Adapter | None, check: CheckIds
) -> tuple[Received, ...]:
    """Returns the received part of each answer that the client gets; () if there was no earlier call. Raises
    InvalidRequest, and AdapterRefused if other weights computed the tokens. adapter: the one that the request's model
    names now."""
    resume, count = message.resume, len(message.resume.answers)
    if resume.token_ids or any(answer.token_ids for answer in resume.answers):
        _check_adapter(message, adapter)
    if params.num_answers == 1:
        if count:
            raise InvalidRequest(f"resume.answers has {count} entries; with one answer, send token_ids instead")
        check("resume.token_ids", np.array(resume.token_ids, np.int64))
        return (Received(tuple(resume.token_ids)),) if resume.token_ids else ()
    if resume.token_ids:
        raise InvalidRequest(
            f"resume.token_ids has {len(resume.token_ids)} ids; with {params.num_answers} answers "
            "resume.answers has them"
        )
    if count not in (0, params.n):
        raise InvalidRequest(f"resume.answers has {count} entries; it must have none or sampling.n: {params.n}")
    for index, answer in enumerate(resume.answers):
        check(f"resume.answers[{index}].token_ids", np.array(answer.token_ids, np.int64))
    received = tuple(Received(tuple(answer.token_ids), answer.ended) for answer in resume.answers)
    if params.num_answers > params.n and any(answer.token_ids and not answer.ended for answer in received):
        raise InvalidRequest("resume.answers: with best_of an answer comes whole; it has ended or has no token_ids")
    if received and all(answer.ended for answer in received):
        raise InvalidRequest("resume.answers have all ended; only a request that has not ended can be resumed")
    return received


def _check_adapter(message: inference_pb2.GenerateRequest, adapter: Adapter | None) -> None:
    """Raises AdapterRefused unless the tokens so far come from the weights that the request's model names now."""
    now = b"" if adapter is None else adapter.digest
    before = message.resume.adapter
    if before != now:
        stands = f"the adapter {now.hex()}" if now else "the model itself"
        raise AdapterRefused(
            f"resume.adapter is {before.hex() or 'empty'}, and model {message.model!r:.80} stands for {stands} now, so "
            "the tokens are of other weights; send the request again without resume"
        )
