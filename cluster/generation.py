"""One request at the gateway, from its arrival to its last message."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable

from tandem.cluster.errors import ServerError
from tandem.cluster.request import ValidRequest
from tandem.cluster.router import Placement
from tandem.cluster.text_output import TextOutput
from tandem.proto import inference_pb2, worker_pb2
from tandem.workers.finish import FinishReason, FinishRule
from tandem.workers.messages import sampling_to_proto
from tandem.workers.tokenizer import Tokenizer


class Generation:
    """Drives a placed request: RemoteSend and StartGenerate go out together, the first token comes from the
    prefill worker and all others from the decode worker. Used once."""

    def __init__(
        self, request: ValidRequest, arrived: float, tokenizer: Tokenizer | None, eos_token_ids: tuple[int, ...]
    ) -> None:
        self._request = request
        self._arrived = arrived
        self._output = TextOutput(request.params, tokenizer)
        self._rule = FinishRule.of(request.params, eos_token_ids)
        self._usage = inference_pb2.Usage(prompt_tokens=len(request.token_ids))
        self._timings = inference_pb2.Timings()
        self._first_is_last = False
        self.complete = False  # both workers have ended the request by themselves

    async def run(self, placement: Placement, timeout: float) -> AsyncGenerator[inference_pb2.GenerateResponse]:
        """The messages for the client; timeout in seconds bounds both calls."""
        self._timings.queue_seconds = time.perf_counter() - self._arrived
        self._timings.pages = placement.reservation.pages
        send, start = self._calls(placement)
        first = asyncio.ensure_future(_answer(placement.prefill.stub.RemoteSend(send, timeout=timeout)))
        stream = placement.decode.stub.StartGenerate(start, timeout=timeout)
        try:
            message = self._first_message(await first)
            yield message
            if message.finish_reason and not self._first_is_last:
                return  # a stop string: the decode worker does not know
            async for tokens in stream:
                reason = FinishReason(tokens.finish_reason)
                if reason in (FinishReason.ABORT, FinishReason.ERROR):
                    raise ServerError(f"the decode worker ended the request with {reason.name}")
                self.complete = reason != FinishReason.RUNNING
                if message.finish_reason:
                    return  # the first token was the last: what has come is the decode worker's agreement
                message = self._message(list(tokens.token_ids), reason)
                message.logprobs.extend(tokens.logprobs[: len(message.token_ids)])
                yield message
                if message.finish_reason:
                    return
        finally:
            first.cancel()
            stream.cancel()

    def _calls(self, placement: Placement) -> tuple[worker_pb2.RemoteSendRequest, worker_pb2.StartGenerateRequest]:
        request = self._request
        sampling = sampling_to_proto(request.params)
        send = worker_pb2.RemoteSendRequest(
            request_id=placement.request_id,
            epoch=placement.prefill.epoch,
            token_ids=request.token_ids,
            sampling=sampling,
            reservation=placement.reservation,
        )
        start = worker_pb2.StartGenerateRequest(
            request_id=placement.request_id,
            epoch=placement.decode.epoch,
            reservation_id=placement.reservation.reservation_id,
            sampling=sampling,
        )
        return send, start

    def _first_message(self, sent: worker_pb2.RemoteSendResponse) -> inference_pb2.GenerateResponse:
        timings = self._timings
        timings.prefill_seconds = sent.prefill_seconds
        timings.push_seconds = sent.push_seconds
        timings.bytes_pushed = sent.bytes_pushed
        timings.first_token_seconds = time.perf_counter() - self._arrived
        self._usage.cached_tokens = sent.cached_tokens
        reason = self._rule.reason(sent.first_token, 1)
        self._first_is_last = reason != FinishReason.RUNNING
        message = self._message([sent.first_token], reason)
        if sent.HasField("logprobs"):
            message.logprobs.append(sent.logprobs)
        return message

    def _message(self, token_ids: list[int], reason: FinishReason) -> inference_pb2.GenerateResponse:
        part = self._output.add(token_ids, reason)
        self._usage.output_tokens += part.num_tokens
        message = inference_pb2.GenerateResponse(
            request_id=self._request.request_id,
            token_ids=token_ids[: part.num_tokens],
            text=part.text,
            finish_reason=int(part.finish_reason),  # type: ignore[arg-type]  # same numbers
        )
        if part.finish_reason != FinishReason.RUNNING:
            self._timings.total_seconds = time.perf_counter() - self._arrived
            message.usage.CopyFrom(self._usage)
            message.timings.CopyFrom(self._timings)
        return message


async def _answer(call: Awaitable[worker_pb2.RemoteSendResponse]) -> worker_pb2.RemoteSendResponse:
    return await call
