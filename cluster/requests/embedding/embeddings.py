"""Embeddings and scores of prompts, for all frontends."""

import asyncio
import time
import uuid
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from tandem.cache.plan.arrays import Int64Array
from tandem.cluster.errors import InvalidRequest, Overloaded, Unavailable
from tandem.cluster.requests.body_budget import release_current_body
from tandem.cluster.requests.charging.charges import charged
from tandem.cluster.requests.embedding.inputs import InputReader
from tandem.cluster.requests.embedding.reading import PromptReading, ReadAnswer, ReadingJob, Values
from tandem.cluster.requests.embedding.recipe import EmbeddingRecipe
from tandem.cluster.requests.embedding.scoring import Pairs, ScorePrompt
from tandem.cluster.requests.model_limits import ModelLimits
from tandem.cluster.requests.observer import Observe, RequestObserver
from tandem.cluster.requests.origin import current_origin
from tandem.cluster.requests.validation import MAX_REQUEST_ID, RequestValidator, ValidRequest
from tandem.proto import inference_pb2
from tandem.workers.sampling.finish import FinishReason
from tandem.workers.sampling.sampling_params import SamplingParams
from tandem.workers.wire.prompt_spec import PromptSpec

MOST_ANSWER = 1 << 23  # numbers of one answer: 32 MiB
MOST_HELD = 1 << 24  # numbers of all answers under way in this process
NO_OUTPUT = SamplingParams(max_tokens=0)


@dataclass(frozen=True)
class Caller:
    """The caller of a request. See ActiveRequests.serve."""

    client: str
    host: str = ""
    credential: str = ""
    seconds: float | None = None


class Embeddings:
    """Computes embeddings and scores. Owned by the gateway's event loop."""

    def __init__(
        self,
        inputs: InputReader,
        scoring: ScorePrompt,
        reading: PromptReading,
        validator: RequestValidator,
        limits: ModelLimits,
        recipe: EmbeddingRecipe,
        observe: Observe,
        *,
        architecture: str,
        request_seconds: float,
    ) -> None:
        self._inputs, self._scoring, self._reading = inputs, scoring, reading
        self._validator, self._limits, self._recipe = validator, limits, recipe
        self._observe, self._request_seconds = observe, request_seconds
        self._architecture = architecture
        self._held = 0
        self._ended: Unavailable | None = None
        self._running: set[asyncio.Task[ReadAnswer]] = set()

    def end(self, error: Unavailable) -> None:
        """Ends all calls with this error, and every later one."""
        self._ended = error
        for work in self._running:
            work.cancel()

    @contextmanager
    def embedding_room(self, count: int, dimensions: int | None) -> Generator[None]:
        """Reserves memory for an answer while the block runs. Raises Overloaded, and InvalidRequest for an answer that
        is too long."""
        numbers = count * min(dimensions or self._limits.hidden_size, self._limits.hidden_size)
        if numbers > MOST_ANSWER:
            raise InvalidRequest(
                f"inputs has {count} entries, whose embeddings have {numbers} numbers together; at most {MOST_ANSWER} "
                "are allowed: send fewer inputs, or ask for fewer dimensions"
            )
        if self._held and self._held + numbers > MOST_HELD:
            raise Overloaded(f"{self._held} numbers of embeddings are under way; at most {MOST_HELD} are allowed")
        self._held += numbers
        try:
            yield
        finally:
            self._held -= numbers

    async def embed(self, request: inference_pb2.EmbedRequest, caller: Caller) -> tuple[str, ReadAnswer]:
        """Returns the request's id, and float32 [inputs, dimensions]. Raises CallErrors, as PromptReading.run()
        does."""
        with self._watched(request.request_id, caller) as watched:
            current_origin.get().access.look()
            self._check(request)
            inputs = await self._inputs.read(request, caller.host)
            priority = self._priority(request.priority, request.service_tier)
            specs = self._specs(inputs.token_ids, request.cache_salt, priority, caller)
            mean, width = self._recipe.mean, self._limits.hidden_size
            kept = request.dimensions if request.HasField("dimensions") else width
            job = ReadingJob(watched.request_id, specs, width, kept, mean, inputs.skipped)
            release_current_body()
            answer = await self._run(job, caller, watched)
            normalizes = request.normalize if request.HasField("normalize") else self._recipe.normalizes
            values = await asyncio.to_thread(_normalized, answer.values) if normalizes else answer.values
            return watched.request_id, ReadAnswer(values, answer.usage, answer.timings)

    async def score(self, pairs: Pairs, caller: Caller, request_id: str = "") -> tuple[str, ReadAnswer]:
        """Returns the request's id, and float32 [pairs]: how good each pair is, between 0 and 1."""
        with self._watched(request_id, caller) as watched:
            current_origin.get().access.look()
            self._check_model()
            self._inputs.check_count("documents", len(pairs.texts))
            ids = await self._scoring.tokens(pairs, caller.host)
            specs = self._specs(ids, "", self._priority(pairs.priority, pairs.service_tier), caller)
            release_current_body()
            token_ids = self._scoring.token_ids
            job = ReadingJob(watched.request_id, specs, len(token_ids), len(token_ids), token_ids=token_ids)
            answer = await self._run(job, caller, watched)
            good, bad = answer.values.astype(np.float64).T
            scores = (1 / (1 + np.exp(np.clip(bad - good, -700, 700)))).astype(np.float32)
            return watched.request_id, ReadAnswer(scores, answer.usage, answer.timings)

    async def _run(self, job: ReadingJob, caller: Caller, watched: "_Watched") -> ReadAnswer:
        limit = self._request_seconds if caller.seconds is None else min(caller.seconds, self._request_seconds)
        deadline = asyncio.get_running_loop().time() + limit
        if self._ended is not None:
            raise self._ended
        async with charged(current_origin.get().access, sum(map(len, job.prompts))) as had:
            watched.begin(ValidRequest(job.request_id, job.prompts[0], NO_OUTPUT))
            return await self._read(job, caller, watched, deadline, had)

    async def _read(
        self, job: ReadingJob, caller: Caller, watched: "_Watched", deadline: float, had: dict[int, int]
    ) -> ReadAnswer:
        work = asyncio.create_task(self._reading.run(job, caller.client, deadline, watched.observer, had))
        self._running.add(work)
        try:
            answer = await work
        except asyncio.CancelledError:
            if self._ended is not None:
                raise self._ended from None
            raise
        finally:
            self._running.discard(work)
        watched.observer.read(answer.usage)
        watched.usage, watched.timings = answer.usage, answer.timings
        return answer

    def _specs(self, ids: Sequence[Int64Array], cache_salt: str, priority: int, caller: Caller) -> list[PromptSpec]:
        salt = self._validator.salt(cache_salt, caller.credential)
        return [PromptSpec(one, salt, priority=priority) for one in ids]

    def _priority(self, priority: int, service_tier: str) -> int:
        if priority:
            self._validator.check_priority("priority", priority)
        if service_tier and priority:
            raise InvalidRequest(f"service_tier is {service_tier!r:.80}; leave it out when priority is set")
        return self._validator.priority(service_tier, priority)

    def _check(self, request: inference_pb2.EmbedRequest) -> None:
        self._check_model()
        if why := self._recipe.refused or self._recipe.unpooled:
            raise InvalidRequest(f"the model makes no embeddings: {why}")
        if len(request.request_id) > MAX_REQUEST_ID:
            raise InvalidRequest(
                f"request_id has {len(request.request_id)} characters; it may have at most {MAX_REQUEST_ID}"
            )
        width = self._limits.hidden_size
        if request.HasField("dimensions") and not 1 <= request.dimensions <= width:
            raise InvalidRequest(f"dimensions is {request.dimensions}; it must be from 1 to {width}")

    def _check_model(self) -> None:
        self._validator.adapter("")  # whether the caller may use the model
        if self._limits.max_encoder_tokens:
            raise InvalidRequest(
                f"the model is a {self._architecture}, which has an encoder; embeddings and scores are of models that "
                "are decoders alone"
            )

    @contextmanager
    def _watched(self, request_id: str, caller: Caller) -> "Generator[_Watched]":
        arrived = time.perf_counter()
        watched = _Watched(self._observe(request_id, caller.client, arrived), request_id or uuid.uuid4().hex)
        try:
            yield watched
        except BaseException as error:
            left = isinstance(error, asyncio.CancelledError)
            watched.end(FinishReason.ABORT if left else FinishReason.ERROR, error)
            raise
        watched.end(FinishReason.STOP, None)


class _Watched:
    """A request with its observers."""

    def __init__(self, observer: RequestObserver, request_id: str) -> None:
        self.observer, self.request_id = observer, request_id
        self.usage, self.timings = inference_pb2.Usage(), inference_pb2.Timings()

    def begin(self, request: ValidRequest) -> None:
        self.observer.validated(request)

    def end(self, reason: FinishReason, error: BaseException | None) -> None:
        self.observer.ended(reason, error, self.usage, self.timings)


def _normalized(values: Values) -> Values:
    """Returns vectors of length 1. A length of 0 stays 0, as in sentence-transformers."""
    lengths = np.linalg.norm(values.astype(np.float64), axis=1, keepdims=True)
    return (values / np.maximum(lengths, 1e-12)).astype(np.float32)
