"""The masks of what grammars allow in the rows of a step: the loop waits for them, and hands them to the engine."""

from collections.abc import Sequence

from tandem.workers.engine.engine import Engine
from tandem.workers.requests.decode_request import DecodeRequest
from tandem.workers.sampling.guided import masks_of
from tandem.workers.scheduling.batch import DecodeStep


class GuideMasks:
    """Owned by the step thread. A mask follows from the token before, and other threads compute it.

    So a step is launched first, and samples nothing until settle() hands its masks over: behind the launch where no
    other step is in flight, else once that one is read.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._late: Sequence[DecodeRequest] = ()  # rows of the step that was launched last, while it waits for masks

    def launched(self, step: DecodeStep, requests: Sequence[DecodeRequest]) -> None:
        """Notes that the step was launched, with these rows."""
        if step.sampling.is_guided:
            self._late = requests

    def settle(self) -> None:
        """All steps but the last one that was launched are read. Before anything more is launched; waits for masks."""
        requests, self._late = self._late, ()
        if requests:
            self._engine.mask(masks_of(request.constraint for request in requests))

    def drop(self) -> None:
        """Drops what was launched: nothing needs it any more."""
        self._late = ()
