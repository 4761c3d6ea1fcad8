"""Prefixes of decoded sequences that others can share."""

from collections.abc import Sequence

import numpy as np

from tandem.workers.engine.engine import Engine
from tandem.workers.handoff.reservations import Reservations
from tandem.workers.requests.decode_request import DecodeRequest


class PublishedPrefixes:
    """Owned by the step thread. Publishes nothing where the worker does not share, nor of a sequence that slides."""

    def __init__(self, engine: Engine, reservations: Reservations, *, sharing: bool) -> None:
        self._engine = engine
        self._reservations = reservations
        self._sharing = sharing

    def prompts(self, requests: Sequence[DecodeRequest]) -> None:
        """Publishes the prompts of requests whose KV is here. Passes over requests that have ended."""
        for request in requests if self._sharing else ():
            if not request.ended and not request.parked and request.prompt.sliding is None:
                self._engine.publish(request.sequence_id, request.prompt.token_ids, request.prompt.salt)

    def of(self, request_id: str) -> None:
        """Publishes what a request that will be forked has so far. Does nothing if the request is gone."""
        request = self._reservations.get(request_id)
        if request is not None:
            self.so_far(request)

    def so_far(self, request: DecodeRequest) -> None:
        """Publishes a request's prompt and output without the last token, whose KV is not computed yet."""
        if (
            self._sharing
            and request.received
            and not request.parked
            and len(request.output) > 1
            and request.prompt.sliding is None
        ):
            tokens = np.concatenate((request.prompt.token_ids, request.output[:-1]))
            self._engine.publish(request.sequence_id, tokens, request.prompt.salt)
