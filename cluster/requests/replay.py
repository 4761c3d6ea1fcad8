"""One request until it ends, on as many pairs of workers as it takes."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import grpc
import grpc.aio

from tandem.cluster.errors import AttemptsExhausted, DeadlineExceeded
from tandem.cluster.requests.generation import AttemptLost, Generation
from tandem.cluster.routing.router import Placement, Router
from tandem.proto import inference_pb2


class Attempts:
    """Places a request, and when its workers are lost places it again, as prompt and the tokens already sent.

    A draw depends on seed and position only, so the tokens are those that the lost workers would have given. Used once.
    """

    def __init__(self, router: Router, generation: Generation, client: str, max_attempts: int) -> None:
        """client: see Router.place."""
        self._router = router
        self._generation = generation
        self._client = client
        self._max_attempts = max_attempts

    async def run(self, deadline: float) -> AsyncGenerator[inference_pb2.GenerateResponse]:
        """The messages for the client; deadline in the event loop's time.

        A worker that answers INTERNAL counts as lost once. Raises AttemptsExhausted, and what Router.place and
        Generation.run raise.
        """
        reasons: list[str] = []
        failed = False
        while len(reasons) < self._max_attempts:
            try:
                async with aclosing(self._attempt(deadline, again=bool(reasons))) as messages:
                    async for message in messages:
                        yield message
                return
            except AttemptLost as lost:
                if self._generation.finished:
                    return  # only the workers' agreement was still to come
                reasons.append(str(lost))
            except grpc.aio.AioRpcError as error:
                # A forward failed. It may have been another's fault, or this request's: that is found out only once.
                if failed or error.code() != grpc.StatusCode.INTERNAL:
                    raise
                failed = True
                reasons.append(f"a worker answered INTERNAL: {error.details()}")
        raise AttemptsExhausted(
            f"workers were lost in each of {len(reasons)} attempts (gateway.max_attempts); "
            f"{self._generation.num_sent} tokens were sent; the last: {reasons[-1]}"
        )

    async def _attempt(self, deadline: float, again: bool) -> AsyncGenerator[inference_pb2.GenerateResponse]:
        generation = self._generation
        try:
            async with asyncio.timeout_at(deadline):
                placement = await self._router.place(
                    generation.request_id, generation.prompt, generation.max_tokens_left, self._client, again=again
                )
        except DeadlineExceeded:  # gateway.queue_seconds
            raise
        except TimeoutError:
            raise DeadlineExceeded("the request's deadline passed while it was placed") from None
        try:
            left = deadline - asyncio.get_running_loop().time()
            async with aclosing(generation.run(placement, left)) as messages:
                async for message in messages:
                    yield message
        except grpc.aio.UsageError as error:
            raise AttemptLost("the island was started again meanwhile") from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Nobody cancelled this task: the connection was closed under the call, for its processes are gone.
            raise AttemptLost("the island was started again meanwhile") from error
        finally:
            self._give_back(placement, generation.complete)

    def _give_back(self, placement: Placement, complete: bool) -> None:
        self._router.in_background(self._router.give_back(placement, complete))
