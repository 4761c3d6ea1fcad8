"""Requests whose prompt begins with another request's tokens so far."""

from typing import NamedTuple, Protocol

import numpy as np

from tandem.cache.plan.arrays import Int64Array
from tandem.cluster.errors import InvalidRequest
from tandem.cluster.routing.islands import LinkPair
from tandem.cluster.routing.router import Placement
from tandem.proto import inference_pb2

MOST_BESIDE = 512  # further tokens that the parent's decode worker computes


class ForkedFrom(NamedTuple):
    """The place of the KV that a fork begins with. pair: one worker as both of them. request_id: the parent's, as that
    worker knows it."""

    pair: LinkPair | None = None
    request_id: str = ""


NOT_FORKED = ForkedFrom()


class Parent(Protocol):
    """A request that is forked: see Generation."""

    placement: Placement | None

    @property
    def slides(self) -> bool: ...

    @property
    def num_sent(self) -> int: ...

    @property
    def tokens(self) -> Int64Array: ...

    def fits_window(self, position: int) -> bool: ...


def take_tokens(fork: inference_pb2.Fork, parent: Parent | None) -> tuple[Int64Array, ForkedFrom]:
    """Returns the prompt of a fork, int64 [n]. parent: None if the caller has no such request here. Raises
    InvalidRequest for a request that cannot be forked."""
    if parent is None:
        raise InvalidRequest(
            f"fork.request_id is {fork.request_id!r} and fork.index {fork.index}; no such answer of a caller with the "
            "same credentials and cache_salt runs at this gateway process. Send a fork over the connection of its "
            "parent, while that runs and without best_of"
        )
    tokens = parent.tokens
    position = fork.position if fork.HasField("position") else tokens.size
    if not 1 <= position <= tokens.size:
        raise InvalidRequest(f"fork.position is {position}; the parent has {tokens.size} tokens: 1 … {tokens.size}")
    if not parent.fits_window(position):
        raise InvalidRequest(
            f"fork.position is {position}; the parent slides, and had let go of tokens by then that the fork would need"
        )
    placement, prompt = parent.placement, np.concatenate((tokens[:position], np.array(fork.token_ids, np.int64)))
    # The second token comes from the decode worker, which then has all KV. A sliding sequence shares none.
    if placement is None or parent.num_sent < 2 or parent.slides or len(fork.token_ids) > MOST_BESIDE:
        return prompt, NOT_FORKED
    decode = placement.decode
    return prompt, ForkedFrom(LinkPair(decode, decode, 0.0, min(position, prompt.size - 1)), placement.request_id)
