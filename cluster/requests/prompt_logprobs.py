"""Sends the log-probabilities of one request's prompt to its client."""

from collections.abc import AsyncGenerator

import numpy as np

from tandem.cluster.requests.fair_turns import FairTurns, cost_of, most_tokens
from tandem.cluster.requests.validation import ValidRequest
from tandem.cluster.routing.prompt_logprob_call import PromptLogprobCall
from tandem.proto import inference_pb2, worker_pb2


class PromptLogprobs:
    """Sends each entry once, however many placements it takes. Entries come before the first output token, so a request
    that resumes after a token has them."""

    def __init__(self, request: ValidRequest, turns: FairTurns) -> None:
        """turns: each message waits for one."""
        self._request = request
        self._turns = turns
        asks = request.params.prompt_logprobs is not None and not request.received
        self._left = len(request.prompt) if asks else 0  # entries to be sent

    @property
    def wanted(self) -> bool:
        """True if the next placement has to compute the prompt's log-probabilities."""
        return self._left > 0

    async def messages(self, call: PromptLogprobCall) -> AsyncGenerator[inference_pb2.GenerateResponse]:
        """Yields the messages of `call` that the client does not have; fewer if the prompt fails meanwhile."""
        if self._left == len(self._request.prompt):
            yield self._message([inference_pb2.TokenLogprobs()])
        position, cost = 1, cost_of(self._request.params.prompt_logprobs)
        most = most_tokens(cost)
        while (packed := await call.read()) is not None:
            begin, position = position, position + len(packed.logprobs) // 4
            known = len(self._request.prompt) - self._left
            for first in range(max(begin, known), position, most):
                await self._turns.take(cost)
                yield self._message(self._entries(packed, begin, first, min(first + most, position)))

    def _message(self, entries: list[inference_pb2.TokenLogprobs]) -> inference_pb2.GenerateResponse:
        self._left -= len(entries)
        return inference_pb2.GenerateResponse(request_id=self._request.request_id, prompt_logprobs=entries)

    def _entries(
        self, packed: worker_pb2.PackedLogprobs, begin: int, first: int, end: int
    ) -> list[inference_pb2.TokenLogprobs]:
        """Returns the entries of the prompt tokens in [first, end). begin: the first one that `packed` has."""
        count, rows = len(packed.logprobs) // 4, slice(first - begin, end - begin)
        logprobs = np.frombuffer(packed.logprobs, "<f4")[rows].tolist()
        ids = np.frombuffer(packed.top_ids, "<u4").reshape(count, -1)[rows].tolist()
        values = np.frombuffer(packed.top_logprobs, "<f4").reshape(count, -1)[rows].tolist()
        tokens = self._request.prompt.token_ids[first:end].tolist()
        make = inference_pb2.TokenLogprob
        return [
            inference_pb2.TokenLogprobs(
                chosen=make(token_id=token, logprob=logprob),
                top=[make(token_id=one, logprob=value) for one, value in zip(top_ids, top_values, strict=True)],
            )
            for token, logprob, top_ids, top_values in zip(tokens, logprobs, ids, values, strict=True)
        ]
