"""What a request counts against the limits of its caller's key."""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager

from tandem.cluster.keys.access import Access
from tandem.cluster.keys.meter import Charge
from tandem.cluster.requests.answers import Answers
from tandem.cluster.requests.generation import Write
from tandem.cluster.requests.validation import ValidRequest
from tandem.proto import inference_pb2


class RequestCharge:
    """Of one request that generates. Without a key nothing counts."""

    def __init__(self, access: Access, request: ValidRequest, *, is_open: bool) -> None:
        """is_open: its client names no length. Raises as Access.admit()."""
        received = [len(one.token_ids) for one in request.received]
        self._received = sum(received)
        self._prompt = len(request.prompt) - request.prompt.encoder.padding
        count, longest = request.params.num_answers, request.params.max_tokens
        ended = sum(longest - len(one.token_ids) for one in request.received if one.ended)
        most = max(0, count * longest - self._received - ended)
        self._charge: Charge | None = access.admit(self._prompt, most, is_open=is_open)
        self._is_open = is_open
        self.answers: Answers | None = None  # once there are some

    def counting(self, write: Write) -> Write:
        """Writes, and counts output beyond what was counted at first while it comes."""
        charge, count = self._charge, self._prompt
        if charge is None or not self._is_open:
            return write

        async def counted(message: inference_pb2.GenerateResponse) -> None:
            nonlocal count
            count += len(message.token_ids)
            charge.grow(count)
            await write(message)

        return counted

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
        elif error is None or isinstance(error, asyncio.CancelledError):
            self._charge.settle(0, 0)
        else:
            self._charge.cancel()


@contextmanager
def charged(access: Access, prompt_tokens: int) -> Generator[None]:
    """Counts prompts that nobody decodes, unless the block fails. Raises as Access.admit()."""
    charge = access.admit(prompt_tokens, 0)
    try:
        yield
    except BaseException as error:
        if charge is not None and not isinstance(error, asyncio.CancelledError):
            charge.cancel()
        raise
    finally:
        if charge is not None:
            charge.settle(prompt_tokens, 0)
