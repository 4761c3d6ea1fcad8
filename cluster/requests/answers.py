"""The answers to one request: one, n, or the likeliest n of best_of."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from tandem.cluster.requests.fair_turns import cost_of, most_tokens
from tandem.cluster.requests.forks import NOT_FORKED, ForkedFrom
from tandem.cluster.requests.generation import Generation, Write
from tandem.cluster.requests.reading.received import Received
from tandem.cluster.requests.replay import Replay
from tandem.cluster.requests.validation import ValidRequest
from tandem.cluster.routing.islands import LinkPair
from tandem.cluster.routing.router import Router
from tandem.proto import inference_pb2
from tandem.workers.wire.messages import prompt_to_bytes

NOTHING = Received()


class Answers:
    """Runs all answers to a request, each as a separate request with its own seed.

    The first one is placed alone. Once the decode worker has its KV, the others are placed on the same workers. They
    find the prompt there as a prefix, so that only its last, partial page is computed again (docs/decisions/0077).
    """

    def __init__(self, request: ValidRequest, generation: Callable[[ValidRequest], Generation]) -> None:
        """generation: makes the generation of one answer. Answers that have ended for the client get none."""
        params = request.params
        self._request = request
        self._ranked = params.num_answers > params.n
        self._received = request.received or (NOTHING,) * params.n
        indices = [index for index in range(params.num_answers) if self._ranked or not self._received[index].ended]
        self._generations = {index: generation(request.answer(index)) for index in indices}
        self._drafts = {index: Draft(params.logprobs) for index in indices} if self._ranked else {}
        self._unfinished = sum(not received.ended for received in self._received)
        self._turn = asyncio.Lock()  # one message at a time
        self._tells = request.returns_prompt and not self._received[0].token_ids  # until the client has the prompt

    @property
    def generations(self) -> Sequence[Generation]:
        return tuple(self._generations.values())

    def answer(self, index: int) -> Generation | None:
        """Returns an answer's generation; None if there is no such answer, or the client does not get it as it is
        generated."""
        return None if self._ranked else self._generations.get(index)

    @property
    def usage(self) -> inference_pb2.Usage:
        """Returns the usage: the prompt once, and the output of all answers."""
        lead, *_ = self._generations.values()
        before = 0 if self._ranked else sum(len(one.token_ids) for one in self._received if one.ended)
        return inference_pb2.Usage(
            prompt_tokens=lead.usage.prompt_tokens,
            cached_tokens=lead.usage.cached_tokens,
            host_cached_tokens=lead.usage.host_cached_tokens,
            disk_cached_tokens=lead.usage.disk_cached_tokens,
            output_tokens=before + sum(one.usage.output_tokens for one in self._generations.values()),
            drafted_tokens=sum(one.usage.drafted_tokens for one in self._generations.values()),
            accepted_tokens=sum(one.usage.accepted_tokens for one in self._generations.values()),
        )

    async def run(
        self,
        router: Router,
        client: str,
        max_attempts: int,
        deadline: float,
        write: Write,
        fork: ForkedFrom = NOT_FORKED,
    ) -> None:
        """Gives all messages to `write`. An answer that fails ends the others. Raises the errors of Replay.run. fork:
        see Replay."""
        if self._request.params.num_answers == 1:
            (only,) = self._generations.values()
            told = partial(self._write_told, write) if self._tells else write
            await Replay(router, only, client, max_attempts, fork=fork).run(deadline, told)
            return
        landed = asyncio.Event()
        (first, lead), *others = self._generations.items()
        try:
            async with asyncio.TaskGroup() as group:
                replay = Replay(router, lead, client, max_attempts, count=1 + len(others), fork=fork)
                group.create_task(_lead(replay, deadline, self._writer(first, write), landed))
                await landed.wait()
                near = _pair_of(lead)
                for index, one in others:
                    one.await_anew()
                    replay = Replay(router, one, client, max_attempts, near=near)
                    group.create_task(replay.run(deadline, self._writer(index, write)))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        if self._ranked:
            await self._write_best(write)

    def _writer(self, index: int, write: Write) -> Write:
        return self._drafts[index].add if self._ranked else partial(self._write, index, write)

    async def _write(self, index: int, write: Write, message: inference_pb2.GenerateResponse) -> None:
        message.index = index
        async with self._turn:
            if message.finish_reason:
                self._unfinished -= 1
                message.ClearField("usage")
                if not self._unfinished:
                    message.usage.CopyFrom(self.usage)
            await (write(message) if index else self._write_told(write, message))

    async def _write_told(self, write: Write, message: inference_pb2.GenerateResponse) -> None:
        """Writes a message of index 0. The first message carries the prompt, if the client wants it."""
        if self._tells:
            self._tells, message.prompt_token_bytes = False, prompt_to_bytes(self._request.prompt.unpadded)
        await write(message)

    async def _write_best(self, write: Write) -> None:
        """Writes the answers with the highest means first, and of equal ones the lowest index. Other tasks run between
        two messages."""
        ranking = sorted(self._drafts.values(), key=lambda draft: -draft.mean)
        for rank, draft in enumerate(ranking):
            is_told = rank < len(self._received) and not self._received[rank].ended
            while draft.messages:
                message = draft.messages.popleft()
                if is_told:
                    await self._write(rank, write, message)
                await asyncio.sleep(0)  # freeing a message takes time, too


class Draft:
    """One of best_of answers, kept until all have ended."""

    def __init__(self, logprobs: int | None) -> None:
        """logprobs: how many alternatives the client gets for each token. None: no log-probabilities."""
        self._keep = logprobs is not None
        self._most = most_tokens(cost_of(logprobs))
        self.messages = deque[inference_pb2.GenerateResponse]()  # none of them large
        self._sum = 0.0
        self._count = 0

    async def add(self, message: inference_pb2.GenerateResponse) -> None:
        self._sum += sum(token.chosen.logprob for token in message.logprobs)
        self._count += len(message.token_ids)
        if not self._keep:
            message.ClearField("logprobs")
        if self.messages and len(self.messages[-1].token_ids) + len(message.token_ids) <= self._most:
            last = self.messages[-1]
            text = last.text + message.text
            last.MergeFrom(message)
            last.text = text
        else:
            self.messages.append(message)

    @property
    def mean(self) -> float:
        """The mean log-probability of a token."""
        return self._sum / max(1, self._count)


async def _lead(replay: Replay, deadline: float, write: Write, landed: asyncio.Event) -> None:
    """Runs the first answer. Its second token comes from the decode worker, which has all KV by then."""
    count = 0

    async def counted(message: inference_pb2.GenerateResponse) -> None:
        nonlocal count
        count += len(message.token_ids)
        if count > 1:
            landed.set()
        await write(message)

    await replay.run(deadline, counted)
    landed.set()


def _pair_of(generation: Generation) -> LinkPair | None:
    placement = generation.placement
    if placement is None:
        return None
    return LinkPair(placement.decode, placement.prefill, 0.0, generation.usage.prompt_tokens - 1)
