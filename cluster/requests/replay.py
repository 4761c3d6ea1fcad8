"""Runs one request until it ends, and places it again when its workers are lost."""

import asyncio

from tandem.cluster.errors import AttemptsExhausted, DeadlineExceeded, ForwardFailed, PlacementLost
from tandem.cluster.requests.forks import NOT_FORKED, ForkedFrom
from tandem.cluster.requests.generation import Generation, Moved, Write
from tandem.cluster.routing.islands import LinkPair
from tandem.cluster.routing.router import Placement, Router

MOVE_SECONDS = 1.0  # for the decode worker that a request leaves; without its answer the KV may be computed again


class Replay:
    """Places a request, and after a loss places it again with the tokens sent as part of its prompt. Used once.

    A sample depends on seed and position only, so the tokens are those that the lost workers would have given.
    """

    def __init__(
        self,
        router: Router,
        generation: Generation,
        client: str,
        max_attempts: int,
        *,
        count: int = 1,
        near: LinkPair | None = None,
        fork: ForkedFrom = NOT_FORKED,
    ) -> None:
        """client, count, near: see Router.place. near: set for further answers to an admitted request. fork: the place
        of the KV that the first attempt begins with."""
        self._router = router
        self._generation = generation
        self._client = client
        self._max_attempts = max_attempts
        self._count = count
        self._near = near
        self._fork = fork

    async def run(self, deadline: float, write: Write) -> None:
        """Writes the messages for the client. deadline in the event loop's time.

        A failed forward counts as a loss once. Raises AttemptsExhausted, and the errors of Router.place and
        Generation.run.
        """
        reasons: list[str] = []
        failed = False
        move: LinkPair | None = None
        while len(reasons) < self._max_attempts:
            try:
                await self._attempt(deadline, bool(reasons) or move is not None, move, write)
                return
            except Moved as moved:  # no loss, so it costs no attempt
                move = moved.pair
                continue
            except PlacementLost as lost:
                move = None
                if self._generation.finished:
                    return  # only the workers' agreement was still to come
                self._generation.observer.lost(lost)
                reasons.append(str(lost))
            except ForwardFailed as error:
                # Another request may have been at fault. A second failure would be this one's.
                if failed:
                    raise
                self._generation.observer.lost(error)
                failed, move = True, None
                reasons.append(str(error))
            if not self._generation.can_replay:
                raise AttemptsExhausted(
                    "workers were lost, and a request that slides is not computed again once its window is full; "
                    f"{self._generation.num_sent} tokens were sent; {reasons[-1]}"
                )
        raise AttemptsExhausted(
            f"workers were lost in each of {len(reasons)} attempts (gateway.max_attempts); "
            f"{self._generation.num_sent} tokens were sent; the last: {reasons[-1]}"
        )

    async def _attempt(self, deadline: float, again: bool, move: LinkPair | None, write: Write) -> None:
        generation, loop = self._generation, asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(deadline):
                placement = await self._router.place(
                    generation.request_id,
                    generation.prompt,
                    generation.max_tokens_left,
                    self._client,
                    again=again or self._near is not None,
                    move=move,
                    near=None if again else self._near or self._fork.pair,
                    count=self._count,
                    fork_of="" if again else self._fork.request_id,
                )
        except DeadlineExceeded:  # gateway.queue_seconds
            raise
        except TimeoutError:
            raise DeadlineExceeded("the request's deadline passed while it was placed") from None
        cleanup = None
        try:
            await generation.run(placement, deadline - loop.time(), write)
        except Moved:  # the decode worker keeps the KV as a prefix once it has ended the request
            cleanup = self._router.in_background(self._router.give_back(placement, complete=False))
            await asyncio.wait([cleanup], timeout=MOVE_SECONDS)
            raise
        finally:
            if cleanup is None:
                self._router.in_background(self._give_back(placement, generation.complete))

    async def _give_back(self, placement: Placement, complete: bool) -> None:
        """Gives a placement back. Very many requests may be cancelled at once, and workers hear of each."""
        if not complete:
            await self._generation.turn()
        await self._router.give_back(placement, complete)
