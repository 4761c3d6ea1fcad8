"""The call that brings the log-probabilities of one request's prompt."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from tandem.proto import worker_pb2


class PromptLogprobCall:
    """One call of Worker/PromptLogprobs. Messages are read one by one, so that the worker keeps later ones."""

    def __init__(self, call: Any, errors: Callable[[], AbstractContextManager[None]]) -> None:
        """errors: turns the call's errors into the link's."""
        self._call = call
        self._messages = aiter(call)
        self._errors = errors

    async def opened(self) -> None:
        """Returns when the request may be sent to the worker. Raises WorkerCallErrors."""
        try:
            with self._errors():
                await self._call.initial_metadata()
            if self._call.done():
                await self.read()  # raises
        except BaseException:
            self.cancel()
            raise

    async def read(self) -> worker_pb2.PackedLogprobs | None:
        """Returns the next message; None after the last, and if the prompt has failed. Raises WorkerCallErrors."""
        with self._errors():
            return await anext(self._messages, None)

    def cancel(self) -> None:
        self._call.cancel()
