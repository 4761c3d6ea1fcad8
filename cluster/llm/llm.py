"""A cluster's model as an object: prompts in, outputs out, in their order."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

from tandem.cluster.client.client import GENERATE_SECONDS, AsyncClient, Client
from tandem.cluster.client.client_messages import GenerateUpdate
from tandem.cluster.client.embeddings import Embeddings, EmbedOptions, Inputs
from tandem.cluster.credentials import ClientSecurity
from tandem.cluster.llm.outputs import Output, output_of
from tandem.cluster.protocol import Fork, Options, Prompt
from tandem.workers.event_loop import EventLoopThread

NO_SECURITY = ClientSecurity()
AT_ONCE = 256  # requests of one call of generate(); others wait here and not in the gateway's queue
Prompts = Prompt | Sequence[Prompt]


class AsyncLLM:
    """Generates and embeds within one asyncio loop. `async with` ends what was launched; close() does, too."""

    def __init__(
        self, address: str, security: ClientSecurity = NO_SECURITY, end: Callable[[], None] = lambda: None
    ) -> None:
        """address: HOST:PORT of a gateway's gRPC. end: blocks until what was launched has ended."""
        self.client = AsyncClient(address, security)
        self._end = end

    async def generate(
        self,
        prompts: Prompts,
        *,
        cache_salt: str | None = None,
        timeout: float = GENERATE_SECONDS,
        **sampling: Unpack[Options],
    ) -> list[Output]:
        """Returns one output for each prompt, in their order. A prompt is text, token ids, or a list of messages (a
        chat).

        sampling: see docs/http-and-grpc.md; it applies to all prompts. cache_salt: see Client.generate(). timeout:
        seconds of each request. The first CallError ends the others and is raised.
        """
        turns = asyncio.Semaphore(AT_ONCE)

        async def one(prompt: Prompt) -> Output:
            async with turns:
                updates = self.client.generate(prompt, cache_salt=cache_salt, timeout=timeout, **sampling)
                return output_of(prompt, [update async for update in updates])

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(prompt)) for prompt in as_list(prompts)]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        cache_salt: str | None = None,
        timeout: float = GENERATE_SECONDS,
        **sampling: Unpack[Options],
    ) -> Output:
        """Returns the answer to one chat: messages with role and content."""
        (output,) = await self.generate([messages], cache_salt=cache_salt, timeout=timeout, **sampling)
        return output

    def stream(
        self,
        prompt: Prompt,
        *,
        cache_salt: str | None = None,
        timeout: float = GENERATE_SECONDS,
        **sampling: Unpack[Options],
    ) -> AsyncGenerator[GenerateUpdate, None]:
        """Yields the answer to one prompt as it comes."""
        return self.client.generate(prompt, cache_salt=cache_salt, timeout=timeout, **sampling)

    async def embed(
        self,
        inputs: Inputs,
        *,
        cache_salt: str | None = None,
        timeout: float = GENERATE_SECONDS,
        **options: Unpack[EmbedOptions],
    ) -> Embeddings:
        """Does what Client.embed() does."""
        return await self.client.embed(inputs, cache_salt=cache_salt, timeout=timeout, **options)

    async def close(self) -> None:
        """Idempotent."""
        await self.client.close()
        await asyncio.to_thread(self._end)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        await self.close()


class LLM:
    """AsyncLLM for code that blocks. Any thread may use it."""

    def __init__(
        self, address: str, security: ClientSecurity = NO_SECURITY, end: Callable[[], None] = lambda: None
    ) -> None:
        self.client = Client(address, security)
        self._end = end
        self._closed = False
        self._events = EventLoopThread("llm")
        self._inner = self._events.run(_made(address, security), timeout=10)

    def generate(
        self,
        prompts: Prompts,
        *,
        cache_salt: str | None = None,
        timeout: float = GENERATE_SECONDS,
        **sampling: Unpack[Options],
    ) -> list[Output]:
        many = as_list(prompts)
        rounds = -(-len(many) // AT_ONCE) + 1
        generating = self._inner.generate(many, cache_salt=cache_salt, timeout=timeout, **sampling)
        return self._events.run(generating, timeout * rounds)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        cache_salt: str | None = None,
        timeout: float = GENERATE_SECONDS,
        **sampling: Unpack[Options],
    ) -> Output:
        (output,) = self.generate([messages], cache_salt=cache_salt, timeout=timeout, **sampling)
        return output

    def stream(
        self,
        prompt: Prompt,
        *,
        cache_salt: str | None = None,
        timeout: float = GENERATE_SECONDS,
        **sampling: Unpack[Options],
    ) -> Generator[GenerateUpdate, None, None]:
        return self.client.generate(prompt, cache_salt=cache_salt, timeout=timeout, **sampling)

    def embed(
        self,
        inputs: Inputs,
        *,
        cache_salt: str | None = None,
        timeout: float = GENERATE_SECONDS,
        **options: Unpack[EmbedOptions],
    ) -> Embeddings:
        """Does what Client.embed() does."""
        return self.client.embed(inputs, cache_salt=cache_salt, timeout=timeout, **options)

    def close(self) -> None:
        """Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self.client.close()
            self._events.run(self._inner.client.close(), timeout=10)
            self._events.stop()
        finally:
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        self.close()


def as_list(prompts: Prompts) -> list[Prompt]:
    """Returns a list of prompts. A single prompt becomes a list: a text, a list of integers, a list of messages, or a
    fork."""
    if isinstance(prompts, str | Fork):
        return [prompts]
    many: Iterable[object] = list(prompts)
    if many and all(isinstance(one, int | Mapping) for one in many):
        return [many]  # type: ignore[list-item]  # token ids, or a chat
    return many  # type: ignore[return-value]


async def _made(address: str, security: ClientSecurity) -> AsyncLLM:
    """Makes the client on the event loop that its channel belongs to."""
    return AsyncLLM(address, security)
