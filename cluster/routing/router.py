"""Chooses when a request is served, and by which prefill and decode worker."""

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tandem.cache.plan.prefix_chain import adapter_salt, encoder_salt
from tandem.cluster.errors import AdapterMissing, DeadlineExceeded, WorkerFull, WorkerTimedOut, WorkerUnreachable
from tandem.cluster.routing.admission import AdmissionQueue
from tandem.cluster.routing.islands import Islands, LinkPair
from tandem.cluster.routing.policy import Ask
from tandem.cluster.routing.prefill_hints import EarlyToken
from tandem.cluster.routing.prefix_view import PromptKeys
from tandem.cluster.routing.worker_link import WorkerLink, lacks_slot, would_park
from tandem.proto import worker_pb2
from tandem.workers.event_loop import unwatched
from tandem.workers.wire.messages import prompt_to_proto
from tandem.workers.wire.prompt_spec import PromptSpec

RETRY_SECONDS = 0.1  # between attempts of the head of the queue when nothing was given back meanwhile
PREPARE_SECONDS = 5.0  # a decode worker answers between two steps
ABORT_AGAIN_SECONDS = 1.0
JUST_NOW_SECONDS = 0.02  # after all workers were asked, workers that would make room need not be found again


@dataclass(eq=False)
class _Wanted:
    """A request without a placement. would_park: workers that had no room when all were asked, and would park requests
    to make some. lacking: whether each worker without room lacked a slot for the adapter. asked: when that was."""

    request_id: str
    prompt: PromptSpec
    max_tokens: int
    keys: PromptKeys
    fork_of: str
    would_park: list[WorkerLink] = field(default_factory=list)
    lacking: dict[WorkerLink, bool] = field(default_factory=dict)
    asked: float = 0.0

    @property
    def lacks_slot(self) -> bool:
        """Whether it waits for a slot for its adapter, and for nothing else."""
        return bool(self.lacking) and all(self.lacking.values())

    @property
    def lets_pass(self) -> bool:
        """Whether it lacks nothing that a request without its adapter needs: only a slot, or a worker that holds it."""
        return bool(self.prompt.adapter) and all(self.lacking.values())

    @property
    def total_tokens(self) -> int:
        """The number of tokens that a decode worker keeps."""
        prompt, total = len(self.prompt), len(self.prompt) + self.max_tokens
        sliding = self.prompt.sliding
        return total if sliding is None else min(total, max(prompt, sliding.window))


@dataclass(frozen=True)
class Placement:
    """A pair of workers and the pages that the decode worker set aside."""

    request_id: str  # the one that the workers know
    prefill: WorkerLink
    decode: WorkerLink
    reservation: worker_pb2.Reservation
    prompt_tokens: int  # those that the prefill worker has to compute
    total_tokens: int
    early_token: EarlyToken | None = None  # of an announced prompt: may come before the prefill worker's answer
    expected_seconds: float = 0.0  # until the first token, by the routing policy; 0 if it has no estimate
    asked: float = 0.0  # when the decode worker was, by time.perf_counter()

    @property
    def is_local(self) -> bool:
        """True if the decode worker computes the prompt itself."""
        return self.prefill is self.decode


class Router:
    """Places requests on pairs of workers, in the order that the routing policy gives.

    A request is placed when a decode worker has answered PrepareReceive, because its KV needs pages there first. A
    request without a placement waits its turn, until its deadline.
    """

    def __init__(
        self,
        islands: Islands,
        queue: AdmissionQueue,
        *,
        id_prefix: str,
        queue_seconds: float,
        parks: bool = False,
        check_adapter: Callable[[bytes], None] = lambda digest: None,
    ) -> None:
        """id_prefix: begins the request ids of this gateway, so that workers can tell gateways apart. parks: whether
        workers may park running requests. check_adapter: raises AdapterRefused for the digest of an adapter that is no
        longer served."""
        self._islands = islands
        self._queue = queue
        self._id_prefix = id_prefix
        self._asked = itertools.count(1)
        self._queue_seconds = queue_seconds
        self._given_back = queue.room
        self._parks = parks
        self._check_adapter = check_adapter
        self._cleanup: set[asyncio.Task[object]] = set()

    @property
    def queued(self) -> int:
        """The number of requests that wait for a placement in this process."""
        return self._queue.requests

    async def place(
        self,
        request_id: str,
        prompt: PromptSpec,
        max_tokens: int,
        client: str,
        *,
        again: bool = False,
        move: LinkPair | None = None,
        near: LinkPair | None = None,
        count: int = 1,
        fork_of: str = "",
    ) -> Placement:
        """Finds a pair of workers and skips those that cannot be reached.

        client: the request's owner; waiting clients take turns. again: the request was admitted before, so a full queue
        does not refuse it. move: the pair that is tried first, however many wait. near: the pair that is tried first in
        the request's own turn. count: how many requests it counts as while it waits. fork_of: see
        PrepareReceiveRequest. Raises Overloaded (queue full), DeadlineExceeded (no room in time), AdapterRefused or
        WorkerCallError.
        """
        token_ids, encoder_len = prompt.token_ids, prompt.encoder.length
        key_salt = adapter_salt(prompt.adapter, prompt.salt)
        key_salt = encoder_salt(token_ids[:encoder_len], key_salt) if encoder_len else key_salt
        keys = self._islands.prompt_keys(token_ids[:1] if prompt.whole else token_ids, key_salt)  # one token has none
        wanted = _Wanted(request_id, prompt, max_tokens, keys, fork_of)
        if move is not None or not self._queue.waits:
            placement = await self._try(wanted, announce=move is None, first=move or near)
            if placement is not None:
                return placement
        try:
            async with (
                asyncio.timeout(self._queue_seconds),
                self._queue.turn(
                    client,
                    count * wanted.total_tokens,
                    requests=count,
                    admitted=again,
                    priority=prompt.priority,
                    group=prompt.adapter,
                ),
            ):
                return await self._wait_for_room(wanted, near)
        except TimeoutError:
            raise DeadlineExceeded(
                f"no {self._lack(wanted)} for {len(prompt)} prompt and {max_tokens} output tokens "
                f"within {self._queue_seconds:g} s (gateway.queue_seconds)"
            ) from None

    def _lack(self, wanted: _Wanted) -> str:
        """What a request has waited for."""
        if (adapter := wanted.prompt.adapter) and not self._islands.holds(adapter):
            return f"worker held the adapter {adapter.hex()}"
        if wanted.lacks_slot:
            return f"decode worker had a slot for the adapter {adapter.hex()} (adapters.max_resident)"
        return "decode worker had room"

    async def give_back(self, placement: Placement, complete: bool) -> None:
        """Ends a placement. Unless it is complete, both workers get an Abort, the sender first.

        The sender's answer means that it writes no more. Only then may the receiver reuse the pages. A sender that
        cannot answer yet is asked once more. After that leases and recalls end the rest.
        """
        request_id, quiet = placement.request_id, True
        placement.prefill.forget_prompt(request_id)
        if placement.early_token is not None:
            placement.early_token.cancel()
        if not complete:
            quiet = placement.is_local or await placement.prefill.abort(request_id)
            await placement.decode.abort(request_id, writer_quiet=quiet)
        self._count(placement.decode, placement.prefill, -placement.total_tokens, -placement.prompt_tokens)
        self._given_back.set()
        if not quiet:
            await asyncio.sleep(ABORT_AGAIN_SECONDS)
            if await placement.prefill.abort(request_id):
                await placement.decode.abort(request_id, writer_quiet=True)

    def _pairs(self, wanted: _Wanted, first: LinkPair | None) -> Iterable[LinkPair]:
        adapter = wanted.prompt.adapter
        pairs = self._islands.pairs(Ask(len(wanted.prompt), wanted.max_tokens), wanted.keys, adapter)
        if first is None or not self._islands.serves(first):
            return pairs
        if adapter and not (adapter in first.decode.adapters and adapter in first.prefill.adapters):
            return pairs
        return itertools.chain((first,), pairs)

    @staticmethod
    def _count(decode: WorkerLink, prefill: WorkerLink, total_tokens: int, prompt_tokens: int) -> None:
        decode.load += total_tokens
        decode.decoding += 1 if total_tokens > 0 else -1
        if prefill is not decode:
            prefill.load += prompt_tokens

    def look_again(self) -> None:
        """Looks for room again: an island has come or gone, so a waiting request may have room now."""
        self._given_back.set()

    async def close(self) -> None:
        """Waits for clean-ups under way."""
        await asyncio.gather(*self._cleanup, return_exceptions=True)

    async def _wait_for_room(self, wanted: _Wanted, near: LinkPair | None) -> Placement:
        while True:
            await self._queue.first()
            self._given_back.clear()
            placement, just_asked = None, time.perf_counter() - wanted.asked < JUST_NOW_SECONDS
            if not (wanted.would_park and just_asked):
                placement = await self._try(wanted, first=near)
            if placement is None and wanted.would_park:
                placement = await self._try(wanted, first=near, parks=True)
            if placement is not None:
                return placement
            if wanted.lets_pass and self._queue.let_pass():
                continue
            with suppress(TimeoutError):
                await asyncio.wait_for(self._given_back.wait(), RETRY_SECONDS)

    async def _try(
        self, wanted: _Wanted, *, announce: bool = False, first: LinkPair | None = None, parks: bool = False
    ) -> Placement | None:
        """Reserves on the first pair whose decode worker has room, `first` before those of the policy; None without
        one.

        announce: an idle prefill worker hears of the prompt before there is room for it. parks: asks workers that would
        park requests to make room.
        """
        self._check_adapter(wanted.prompt.adapter)
        makers, wanted.would_park = wanted.would_park, []
        if not parks:
            wanted.lacking = {}
        # A single decode worker makes room at once: no other could have some.
        may_park = parks or (self._parks and self._islands.has_one_decoder)
        total, prompt, message = wanted.total_tokens, wanted.prompt, prompt_to_proto(wanted.prompt)
        for pair in self._pairs(wanted, first):
            decode, prefill = pair.decode, pair.prefill
            if parks and decode not in makers:
                continue
            computed = len(prompt) - pair.matched_tokens
            # No id is used twice: a late Abort of an earlier call must not end this one.
            worker_id = f"{self._id_prefix}{next(self._asked)}/{wanted.request_id}"
            request = worker_pb2.PrepareReceiveRequest(
                request_id=worker_id,
                epoch=decode.epoch,
                max_tokens=wanted.max_tokens,
                writer_pe=prefill.pe,
                writer_epoch=prefill.epoch,
                prompt=message,
                fork_of=wanted.fork_of,
                parks=may_park,
            )
            expected = pair.first_token_seconds
            announce = announce and prefill is not decode and not prefill.has_prompts and not prompt.whole
            early = self._announce(prefill, worker_id, message) if announce else None
            announce = False
            prefill.expect_prompt(worker_id, computed)
            # Already, for the next request comes while this one waits for the answer.
            self._count(decode, prefill, total, computed)
            reservation, asked = None, time.perf_counter()
            try:
                reservation = await self._prepare(decode, request, wanted)
            finally:
                if reservation is None:
                    self._count(decode, prefill, -total, -computed)
                    prefill.forget_prompt(worker_id)
                    if early is not None:
                        early.cancel()
                        self.in_background(prefill.abort(worker_id))
            if reservation is not None:
                return Placement(worker_id, prefill, decode, reservation, computed, total, early, expected, asked)
        wanted.asked = time.perf_counter()
        return None

    def _announce(self, prefill: WorkerLink, request_id: str, prompt: worker_pb2.PromptSpec) -> EarlyToken:
        token = prefill.hints.expect(request_id)
        announcement = worker_pb2.AnnounceRequest(request_id=request_id, epoch=prefill.epoch, prompt=prompt)
        self.in_background(prefill.hints.send(announcement))
        return token

    async def _prepare(
        self, decode: WorkerLink, request: worker_pb2.PrepareReceiveRequest, wanted: _Wanted
    ) -> worker_pb2.Reservation | None:
        call = unwatched(asyncio.ensure_future(self._ask(decode, request, wanted)))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            # The worker may answer all the same. Then its pages are given back.
            self.in_background(self._abandon(decode, request.request_id, call))
            raise

    async def _abandon(
        self, decode: WorkerLink, request_id: str, call: "asyncio.Future[worker_pb2.Reservation | None]"
    ) -> None:
        await asyncio.wait([call])
        await decode.abort(request_id, writer_quiet=True)

    async def _ask(
        self, decode: WorkerLink, request: worker_pb2.PrepareReceiveRequest, wanted: _Wanted
    ) -> worker_pb2.Reservation | None:
        """Asks a decode worker for room. None when it has none or does not answer: another may have room."""
        try:
            return await decode.prepare(request, PREPARE_SECONDS)
        except WorkerFull as error:
            wanted.lacking[decode] = lacks_slot(error)
            if self._parks and would_park(error) and decode not in wanted.would_park:
                wanted.would_park.append(decode)
            return None
        except AdapterMissing:
            decode.lacks_adapter(request.prompt.adapter)
            return None
        except (WorkerUnreachable, WorkerTimedOut):  # a stopped worker may answer when it goes on
            decode.avoid()
            self.in_background(decode.abort(request.request_id, writer_quiet=True))  # no sender has its reservation
            return None

    def in_background(self, coroutine: Coroutine[Any, Any, object]) -> asyncio.Task[object]:
        """Runs work that must be done even when its caller is gone. close() waits for it."""
        task = asyncio.create_task(coroutine)
        self._cleanup.add(task)
        task.add_done_callback(self._cleanup.discard)
        return task
