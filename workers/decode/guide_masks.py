"""What grammars allow in the rows of a step: the loop waits for these masks, and the engine gets their words."""

from collections.abc import Sequence

from tandem.workers.engine.engine import Engine
from tandem.workers.requests.decode_request import DecodeRequest
from tandem.workers.sampling.guided import masks_of
from tandem.workers.scheduling.batch import DecodeStep


class GuideMasks:
    """Owned by the step thread. A mask follows from the token before.

    - A step that is launched while no other is in flight takes its masks along.
    - A step that is launched behind another samples nothing until that one is read. Then settle() hands its masks over.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._late: Sequence[DecodeRequest] = ()  # rows of the step in flight, while it waits for masks

    def known(self, step: DecodeStep, requests: Sequence[DecodeRequest]) -> DecodeStep:
        """The step with its masks, behind tokens that are all known. Waits for them."""
        if not step.sampling.lacks_masks:
            return step
        return step._replace(sampling=step.sampling.masked(request.constraint for request in requests))

    def launched(self, step: DecodeStep, requests: Sequence[DecodeRequest]) -> None:
        """The step was launched, with these rows."""
        if step.sampling.lacks_masks:
            self._late = requests

    def settle(self) -> None:
        """All steps but the last one that was launched are read. Before anything more is launched."""
        requests, self._late = self._late, ()
        if requests:
            self._engine.mask(masks_of(request.constraint for request in requests))

    def drop(self) -> None:
        """What was launched is not wanted any more."""
        self._late = ()
