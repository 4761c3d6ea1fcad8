"""Opens the servers that are loaded: tandem's gateway, or others with OpenAI's API."""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from tandem.cluster.client.client import AsyncClient
from tandem.cluster.credentials import ClientSecurity, read_token
from tandem.cluster.errors import CallError
from tandem.cluster.tools.bench.sessions import Message
from tandem.cluster.tools.bench.targets import Refused, Served, Target, TargetSpec
from tandem.cluster.tools.bench.timeline import Running

CONNECTIONS = 4  # of one process to a gateway


def open_target(spec: TargetSpec) -> Target:
    """Opens a target. Raises ConfigError, UsageError."""
    token = None if spec.token_file is None else read_token(Path(spec.token_file), "--token-file")
    if spec.urls:
        from tandem.cluster.tools.bench.openai import OpenAiTarget

        return RoundRobin([OpenAiTarget(url, spec, token) for url in spec.urls])
    return GrpcTarget(spec.grpc, ClientSecurity(token, spec.tls_ca, spec.tls_cert, spec.tls_key), spec)


class RoundRobin:
    """Servers of one model, which get requests in turns."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self._targets = targets
        self._turns = itertools.cycle(targets)

    async def served(self) -> Served:
        """Returns what all servers can serve. Raises Refused if they serve different models."""
        all_served = [await target.served() for target in self._targets]
        if len(models := {each.model for each in all_served}) > 1:
            raise Refused(f"the servers have different models, {sorted(models)}; give --model-name")
        lengths = [each.max_model_len for each in all_served if each.max_model_len is not None]
        return dataclasses.replace(all_served[0], max_model_len=min(lengths, default=None))

    async def stream(self, messages: Sequence[Message], running: Running, timeout: float) -> None:
        await next(self._turns).stream(messages, running, timeout)

    async def aclose(self) -> None:
        for target in self._targets:
            await target.aclose()


class GrpcTarget:
    """tandem's gateway, called by its own clients. Each has a connection, for a gateway may have several processes."""

    def __init__(self, address: str, security: ClientSecurity, spec: TargetSpec) -> None:
        self._clients = [AsyncClient(address, security) for _ in range(CONNECTIONS)]
        self._turns = itertools.cycle(self._clients)
        self._sampling: dict[str, Any] = {"temperature": spec.temperature, "ignore_eos": True}
        if spec.first_token_seconds is not None:
            self._sampling["first_token_seconds"] = spec.first_token_seconds
        self._salt = spec.salt
        self._asked_tokens = spec.asked_tokens

    async def served(self) -> Served:
        info = await self._clients[0].model_info()
        return Served(info.name, info.vocab_size, info.max_model_len)

    async def stream(self, messages: Sequence[Message], running: Running, timeout: float) -> None:
        prompt = [token for message in messages for token in message.token_ids]
        sampling: dict[str, Any] = self._sampling | {"max_tokens": self._asked_tokens or running.expected_tokens}
        updates = next(self._turns).generate(prompt, timeout=timeout, cache_salt=self._salt, **sampling)
        running.sent = perf_counter()
        try:
            async for update in updates:
                if update.token_ids:
                    running.heard()
                    running.output_tokens += len(update.token_ids)
                    if running.keeps_tokens:
                        running.token_ids += update.token_ids
                    if self._asked_tokens and running.output_tokens >= running.expected_tokens:
                        running.prompt_tokens = len(prompt)
                        break
                if update.usage is not None:
                    running.prompt_tokens = update.usage.prompt_tokens
                    running.cached_tokens = update.usage.cached_tokens
                    running.drafted_tokens = update.usage.drafted_tokens
                    running.accepted_tokens = update.usage.accepted_tokens
        except CallError as error:
            raise Refused(f"{type(error).__name__}: {error}") from None
        finally:
            await updates.aclose()

    async def aclose(self) -> None:
        for client in self._clients:
            await client.close()
