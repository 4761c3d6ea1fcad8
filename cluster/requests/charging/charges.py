"""Counts a request against the limits of its caller's key."""

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace

from tandem.cluster.errors import RateLimited
from tandem.cluster.keys.access import Access
from tandem.cluster.keys.meter import Charge, Paced
from tandem.cluster.requests.answers import Answers
from tandem.cluster.requests.body_budget import current_body
from tandem.cluster.requests.validation import ValidRequest

PACED_SECONDS = 0.05  # between two looks whether a host has heard of the others
PACED_LOOKS = 40


class RequestCharge:
    """The count of one request that generates. Without a key nothing counts."""

    def __init__(self, access: Access, request: ValidRequest, *, is_open: bool) -> None:
        """is_open: its client does not say how long it may be."""
        # Workers compute the tokens that a client says to have as they compute a prompt.
        self._received = sum(len(one.token_ids) for one in request.received)
        self._prompt = len(request.prompt) - request.prompt.encoder.padding + self._received
        self._access = access
        self.request = _shortened(access, self._prompt, request) if is_open else request
        """The one to run: an open one ends where no more tokens are counted for it."""
        self.answers: Answers | None = None  # once there are some
        self._charge: Charge | None = None

    async def count(self) -> ValidRequest:
        """The request to run, which counts from now on. Raises as admitted()."""
        output, body = _output(self.request), current_body.get()
        if body is not None:
            self._access.check_whole(body.tokens, self._prompt + output)
            body.tokens += self._prompt + output
        self._charge = await admitted(self._access, self._prompt, output)
        return self.request

    @contextmanager
    def until_end(self) -> Generator[None]:
        """Settles when the block ends. A prompt that no worker was given does not count. Then the request does not
        either, unless its own client has ended it."""
        try:
            yield
        except BaseException as error:
            self._end(error)
            raise
        self._end(None)

    def _end(self, error: BaseException | None) -> None:
        answers = self.answers
        if self._charge is None:
            return
        if answers is not None and any(one.placement is not None for one in answers.generations):
            output = max(0, answers.usage.output_tokens - self._received)
            self._charge.settle(self._prompt, output)
        elif error is None or (isinstance(error, asyncio.CancelledError) and not _ended_by_another()):
            self._charge.settle(0, 0)
        else:
            self._charge.cancel()


def _ended_by_another() -> bool:
    """Whether another request of the same body has failed, which ends this one."""
    body = current_body.get()
    return body is not None and body.failed


def _output(request: ValidRequest) -> int:
    """The most tokens that all its answers may still get."""
    longest = request.params.max_tokens
    known = [longest if one.ended else min(longest, len(one.token_ids)) for one in request.received]
    return request.params.num_answers * longest - sum(known)


def _shortened(access: Access, prompt: int, request: ValidRequest) -> ValidRequest:
    count, longest = request.params.num_answers, request.params.max_tokens
    most = access.most_open(prompt, _output(request)) // count
    if most >= longest or request.received:  # one that goes on keeps its length
        return request
    most = max(1, most, request.params.min_tokens)
    guided = request.params.guided
    guided = None if guided is None else guided.shortened(longest, most)
    return replace(request, params=replace(request.params, max_tokens=most, guided=guided))


async def admitted(access: Access, prompt: int, output: int) -> Charge | None:
    """Counts a request, see Access.admit(). It waits where this host has to hear first what others have spent."""
    refusal = RateLimited("")
    for _ in range(PACED_LOOKS):
        try:
            return access.admit(prompt, output)
        except Paced as error:
            refusal = RateLimited(str(error), error.retry_after_seconds, error.states)
        await asyncio.sleep(PACED_SECONDS)
    raise refusal


@asynccontextmanager
async def charged(access: Access, prompt_tokens: int) -> AsyncGenerator[dict[int, int]]:
    """Counts prompts that nobody decodes. Raises as admitted().

    The block fills the dict with the tokens that a worker had, by the position of the first prompt in each call of a
    worker. If the block fails, only these count. If there are none, the request does not count either, unless its own
    client has ended it.
    """
    charge = await admitted(access, prompt_tokens, 0)
    had: dict[int, int] = {}
    try:
        yield had
    except BaseException as error:
        if charge is not None and not had and not isinstance(error, asyncio.CancelledError):
            charge.cancel()
        if charge is not None:
            charge.settle(sum(had.values()), 0)
        raise
    if charge is not None:
        charge.settle(prompt_tokens, 0)
