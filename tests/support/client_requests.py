"""Requests through the gRPC server, as tests send them."""

import asyncio
from collections.abc import Sequence
from typing import Any

from tandem.cluster.client import AsyncClient, Client
from tandem.cluster.client.client import RESUME_SECONDS
from tandem.cluster.client.client_messages import GenerateUpdate

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


def complete(address: str, prompt: str | Sequence[int], **sampling: Any) -> list[GenerateUpdate]:
    """Returns all messages of one request."""
    with Client(address) as client:
        return list(client.generate(prompt, timeout=60, **sampling))


def tokens_of(updates: Sequence[GenerateUpdate]) -> list[int]:
    return [token for update in updates for token in update.token_ids]


def text_of(updates: Sequence[GenerateUpdate]) -> str:
    return "".join(update.text for update in updates)


def complete_all(address: str, prompts: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
    """Returns the tokens of many requests sent at once."""
    return [tokens_of(updates) for updates in complete_all_updates(address, prompts, **options)]


def complete_all_updates(
    address: str, prompts: Sequence[Sequence[int]], *, resume_seconds: float = RESUME_SECONDS, **sampling: Any
) -> list[list[GenerateUpdate]]:
    """Returns all messages of many requests sent at once."""

    async def one(client: AsyncClient, prompt: Sequence[int]) -> list[GenerateUpdate]:
        return [update async for update in client.generate(prompt, timeout=120, **sampling)]

    async def every() -> list[list[GenerateUpdate]]:
        async with AsyncClient(address, resume_seconds=resume_seconds) as client:
            return await asyncio.gather(*(one(client, prompt) for prompt in prompts))

    return asyncio.run(every())
