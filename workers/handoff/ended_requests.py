"""Remembers a sender's requests that are over, because calls come late and twice."""

from collections import OrderedDict
from concurrent.futures import Future

from tandem.workers.requests.prefill_request import PrefillRequest, PrefillResult

ABORTED_IDS_REMEMBERED = 4096  # a RemoteSend that arrives after its Abort must not start
RESULTS_REMEMBERED = 1024  # a RemoteSend that arrives again gets the same answer


class EndedRequests:
    """Owned by the step thread."""

    def __init__(self) -> None:
        self._aborted: OrderedDict[str, None] = OrderedDict()
        self._results: OrderedDict[str, Future[PrefillResult]] = OrderedDict()
        self._released: tuple[str, ...] = ()  # prefixes, one for each gateway that was lost

    def abort(self, request_id: str) -> None:
        self._aborted[request_id] = None
        while len(self._aborted) > ABORTED_IDS_REMEMBERED:
            self._aborted.popitem(last=False)

    def release(self, prefix: str) -> None:
        """Treats every request whose id begins with `prefix` as aborted, also requests yet to arrive."""
        self._released = (*self._released, prefix)

    def is_aborted(self, request_id: str) -> bool:
        return request_id in self._aborted or request_id.startswith(self._released)

    def add(self, request: PrefillRequest) -> None:
        self._results[request.request_id] = request.result
        while len(self._results) > RESULTS_REMEMBERED:
            self._results.popitem(last=False)

    def result(self, request_id: str) -> "Future[PrefillResult] | None":
        return self._results.get(request_id)
