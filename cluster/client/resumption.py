"""When a client sends its request again: its connection broke, or the gateway refused it for now."""

import random
import secrets
import time
import uuid
from collections import defaultdict

import grpc

from tandem.cluster.client.client_messages import LONGEST_CALL, UNTAKEN, retry_advice
from tandem.cluster.errors import Cancelled, Overloaded, RateLimited, Unavailable
from tandem.cluster.errors.statuses import REMOVED, error_of
from tandem.proto import inference_pb2

RETRY_SECONDS = 0.2
NO_ADVICE_SECONDS = 1.0  # of a gateway that is full
LONGEST_PAUSE = 10.0  # unless the gateway advises a longer one
FIRST_SECONDS = 1.0  # for a gateway that was never there: it may be starting again
# The beginnings of gRPC's text for an established connection that broke.
BROKEN = (REMOVED, "Socket closed", "Connection reset", "recvmsg:", "GOAWAY")


class Resumption:
    """One request and the tokens of its answers so far. Owned by the generator that streams it.

    The first call sets request_id and seed, so a restarted gateway continues the stream with the same tokens.
    """

    def __init__(self, request: inference_pb2.GenerateRequest, timeout: float, resume_seconds: float) -> None:
        self.request = request
        self._deadline = time.monotonic() + timeout
        self._resume_seconds = resume_seconds
        self._failing_since: float | None = None
        self._refusals = 0
        self._resumes = False
        self._tokens: defaultdict[int, list[int]] = defaultdict(list)  # of each answer, by its index
        self._ended: set[int] = set()
        self._num_prompt_logprobs = 0
        self._repeated = 0  # tokens still to come that are there already
        self._has_prompt = False
        self._adapter = b""  # whose tokens they are
        self._reached = False
        self.finished = False  # the last message has come; a later error does not count
        request.request_id = request.request_id or uuid.uuid4().hex
        if not request.sampling.HasField("seed"):
            request.sampling.seed = secrets.randbits(63)

    @property
    def seconds_left(self) -> float:
        return min(max(0.0, self._deadline - time.monotonic()), LONGEST_CALL)

    def add(self, message: inference_pb2.GenerateResponse) -> None:
        self._failing_since, self._refusals = None, 0
        again = min(self._repeated, len(message.prompt_logprobs))
        del message.prompt_logprobs[:again]
        self._repeated -= again
        self._num_prompt_logprobs += len(message.prompt_logprobs)
        if self._has_prompt:
            message.ClearField("prompt_token_bytes")
        self._has_prompt |= bool(message.prompt_token_bytes)
        if message.token_ids or message.finish_reason:
            self._tokens[message.index] += message.token_ids
            self._adapter = message.adapter
        if message.finish_reason:
            self._ended.add(message.index)
            self.finished = len(self._ended) >= self.request.sampling.n

    def pause(self, error: grpc.RpcError, answered: bool) -> float | None:
        """Returns the seconds to wait before the request is sent again, or None if it failed.

        A request that may have begun is changed to resume. A request that was refused with an advice has not begun. A
        full queue does not fail a request that was admitted before: all requests come back at once. UNAVAILABLE comes
        from the connection, or from a cluster that ends and may start again. A request that never had an answer or a
        connection soon fails.
        """
        now, kind, advice = time.monotonic(), error_of(error), retry_advice(error)
        self._failing_since = now if self._failing_since is None else self._failing_since
        failing_seconds = now - self._failing_since
        self._reached |= answered or (error.details() or "").startswith(BROKEN)
        untaken = kind is Cancelled and error.details() == UNTAKEN  # when the client itself ends, the text differs
        self._reached |= untaken
        if kind is Unavailable or untaken:
            patience = self._resume_seconds if self._reached else min(FIRST_SECONDS, self._resume_seconds)
            least, pause = RETRY_SECONDS, RETRY_SECONDS * random.uniform(0.5, 1.0)
            self._resumes = True
        elif (kind is Overloaded and advice is not None) or (kind in (Overloaded, RateLimited) and self._resumes):
            self._reached, patience = True, self._resume_seconds
            least = NO_ADVICE_SECONDS if advice is None else advice
            pause = self._longer_each_time(least)
        else:
            return None
        if failing_seconds >= patience or self.seconds_left <= least:
            return None
        self._repeated = 0 if self._tokens else self._num_prompt_logprobs
        if self._resumes or self._tokens:
            self.request.resume.CopyFrom(self._resume())
        return pause

    def _resume(self) -> inference_pb2.Resume:
        sampling = self.request.sampling
        if max(sampling.n, sampling.best_of) <= 1:
            return inference_pb2.Resume(token_ids=self._tokens.get(0), adapter=self._adapter)
        indices = range(sampling.n or 1) if self._tokens else ()
        answers = [
            inference_pb2.AnswerSoFar(token_ids=self._tokens.get(index), ended=index in self._ended)
            for index in indices
        ]
        return inference_pb2.Resume(answers=answers, adapter=self._adapter)

    def _longer_each_time(self, advice: float) -> float:
        """Returns a pause of at least the advice, different for each client, and early enough for another try."""
        pause = max(advice, min(max(advice, RETRY_SECONDS) * 2**self._refusals, LONGEST_PAUSE))
        self._refusals += 1
        return min(pause * random.uniform(1.0, 2.0), max(advice, self.seconds_left / 2))
