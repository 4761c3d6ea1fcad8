"""Any server with OpenAI's API: /v1/completions with token ids, or /v1/chat/completions with text."""

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

from tandem.cluster.tools.bench.event_streams import HttpConnections
from tandem.cluster.tools.bench.sessions import Message
from tandem.cluster.tools.bench.targets import Refused, Served, TargetSpec
from tandem.cluster.tools.bench.timeline import Running

LAST = b"[DONE]"
INFO_SECONDS = 10.0
COMPLETIONS, CHAT, MODELS = "/v1/completions", "/v1/chat/completions", "/v1/models"


class OpenAiTarget:
    """Asks for streams with their usage, and for whole outputs (ignore_eos, which vLLM and tandem take)."""

    def __init__(self, url: str, spec: TargetSpec, token: str | None) -> None:
        self._connections = HttpConnections(url, token)
        self._is_chat = spec.endpoint == "chat"
        self._model = spec.model
        self._common: dict[str, Any] = {
            "model": spec.model,
            "temperature": spec.temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if spec.salt:
            self._common["cache_salt"] = spec.salt
        if spec.first_token_seconds is not None:
            self._common["first_token_seconds"] = spec.first_token_seconds

    async def served(self) -> Served:
        """Returns the model of that name, or the first one."""
        try:
            async with asyncio.timeout(INFO_SECONDS):
                models = json.loads(await self._connections.call("GET", MODELS, b"", None))["data"]
            found = next((model for model in models if self._model in ("", model["id"])), None)
            if found is None:
                raise Refused(f"--model-name is {self._model!r}; {[model['id'] for model in models]} are served")
            return Served(found["id"], None, found.get("max_model_len"))
        except (ValueError, KeyError, TypeError) as error:
            raise Refused(f"{MODELS} answers with something else: {error!r:.200}") from None
        except TimeoutError:
            raise Refused(f"{MODELS} did not answer within {INFO_SECONDS:g} s") from None

    async def stream(self, messages: Sequence[Message], running: Running, timeout: float) -> None:
        asked = self._common | {"max_tokens": running.expected_tokens}
        if self._is_chat:
            asked["messages"] = [{"role": message.role, "content": message.content} for message in messages]
        else:
            asked["prompt"] = [token for message in messages for token in message.token_ids]
            if running.keeps_tokens:
                asked["return_token_ids"] = True
        answer = _Answer(running, needs_ids=running.keeps_tokens and not self._is_chat)
        body = json.dumps(asked).encode()
        running.sent = time.perf_counter()
        try:
            async with asyncio.timeout(timeout):
                await self._connections.call("POST", CHAT if self._is_chat else COMPLETIONS, body, answer.take)
        except TimeoutError:
            raise Refused(f"not done within {timeout:g} s") from None
        answer.end()

    async def aclose(self) -> None:
        await self._connections.aclose()


class _Answer:
    """Collects what the events of one stream say about the request."""

    def __init__(self, running: Running, *, needs_ids: bool) -> None:
        self._running = running
        self._needs_ids = needs_ids
        self._has_usage = self._is_done = False

    def take(self, data: bytes) -> None:
        """Takes in an event. A chunk with a choice is a message with tokens, as vLLM counts; one that only names a role
        is none."""
        if data == LAST:
            self._is_done = True
            return
        held = json.loads(data)
        if "error" in held:
            raise Refused(f"the stream ends with {held['error']!r:.300}")
        if held.get("choices"):
            self._choice(held["choices"][0])
        if usage := held.get("usage"):
            self._has_usage = True
            self._running.prompt_tokens = usage["prompt_tokens"]
            self._running.output_tokens = usage["completion_tokens"]
            self._running.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            details = usage.get("completion_tokens_details") or {}
            self._running.accepted_tokens = details.get("accepted_prediction_tokens") or 0
            rejected = details.get("rejected_prediction_tokens") or 0
            self._running.drafted_tokens = self._running.accepted_tokens + rejected

    def end(self) -> None:
        """Ends the answer. Without a usage each message counts as a token."""
        if not self._is_done:
            raise Refused(f"the stream ended without {LAST.decode()}")
        if self._needs_ids and not self._running.token_ids:
            raise Refused("no token_ids came, though return_token_ids was set; such chats need --endpoint chat")
        if not self._has_usage:
            self._running.output_tokens = len(self._running.arrivals)

    def _choice(self, choice: dict[str, Any]) -> None:
        delta = choice.get("delta")
        if delta is not None and "role" in delta and not any(held for name, held in delta.items() if name != "role"):
            return
        self._running.heard()
        if self._running.keeps_tokens:
            self._running.token_ids += choice.get("token_ids") or ()
            self._running.text.append((choice.get("text") if delta is None else delta.get("content")) or "")
