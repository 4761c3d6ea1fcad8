"""Worker/ReadPrompts: from a message to prompts that are read, and from what was read to the answer."""

import numpy as np

from tandem.proto import worker_pb2
from tandem.workers.errors import InvalidCall
from tandem.workers.prefill.prompt_readers import PromptReaders, ReadCall, ReadPrompts
from tandem.workers.requests.reader import Wanted
from tandem.workers.service.call_checks import PromptCheck, check_request_id
from tandem.workers.wire.prompt_spec import MOST_READ

MOST_TOKEN_IDS = 64


def read_call(readers: PromptReaders, check: PromptCheck, request: worker_pb2.ReadPromptsRequest) -> ReadCall:
    """Queues the prompts of a message. On the step thread. Raises InvalidCall."""
    check_request_id(request.request_id)
    if not 1 <= len(request.prompts) <= MOST_READ:
        raise InvalidCall(f"prompts has {len(request.prompts)} entries; it must have from 1 to {MOST_READ}")
    if check.most_encoder:
        raise InvalidCall("the model has an encoder; prompts are read of decoders without one")
    token_ids = tuple(request.token_ids)
    if len(token_ids) > MOST_TOKEN_IDS:
        raise InvalidCall(f"token_ids has {len(token_ids)} entries; it may have at most {MOST_TOKEN_IDS}")
    if token_ids and max(token_ids) >= check.vocab_size:
        raise InvalidCall(f"token_ids has {max(token_ids)}; the vocabulary has {check.vocab_size} entries, from 0 on")
    if (request.mean and token_ids) or (request.skipped and not request.mean):
        given = f"mean is {request.mean}, skipped {request.skipped}, and token_ids has {len(token_ids)} entries"
        raise InvalidCall(f"{given}; set skipped only with mean, and mean only without token_ids")
    prompts = [check.of(prompt) for prompt in request.prompts]
    if any(prompt.sliding is not None for prompt in prompts):
        raise InvalidCall("a prompt has `sliding`; prompts that are read do not slide")
    return readers.submit(request.request_id, prompts, Wanted(request.mean, request.skipped, token_ids))


def to_message(read: ReadPrompts) -> worker_pb2.ReadPromptsResponse:
    """Makes the answer."""
    return worker_pb2.ReadPromptsResponse(
        values=read.values.astype(np.dtype("<f4"), copy=False).tobytes(),
        cached_tokens=read.cached_tokens,
        host_cached_tokens=read.host_cached_tokens,
        disk_cached_tokens=read.disk_cached_tokens,
        queue_seconds=read.queue_seconds,
        seconds=read.seconds,
    )
