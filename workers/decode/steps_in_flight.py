"""Steps that were launched and are not read: the one that is read next, and with overlap scheduling one after it."""

from collections.abc import Sequence
from typing import ClassVar, Protocol

from tandem.workers.engine.engine import Engine
from tandem.workers.handoff.retired import RetiredSequences
from tandem.workers.requests.decode_request import DecodeRequest
from tandem.workers.requests.token_run import TokenRun
from tandem.workers.sampling.pending_samples import PendingSamples, Samples
from tandem.workers.scheduling.step_time import StepLoad


class LaunchedStep(Protocol):
    """A plain step or one that verifies drafts: StepInFlight, Verification."""

    @property
    def requests(self) -> list[DecodeRequest]: ...

    @property
    def pending(self) -> PendingSamples: ...

    @property
    def load(self) -> StepLoad:
        """The work that the device does between the step before and this one."""
        ...

    @property
    def released(self) -> list[int]:
        """The sequences that ended since the launch. The step may write to their pages."""
        ...

    verifies: ClassVar[bool]
    """True if only a verify step may be launched after it."""

    def runs(self, samples: Samples) -> list[TokenRun]:
        """Returns the tokens of each request."""
        ...

    def settle(self, samples: Samples, runs: Sequence[TokenRun], *, is_last: bool) -> None:
        """Ends the step once its tokens are read. is_last: no step is launched after it."""
        ...


class StepsInFlight:
    """The steps in flight, owned by the step thread. A request that ends may still have a row in some: its pages return
    when the last such step is done."""

    def __init__(self, engine: Engine, retired: RetiredSequences) -> None:
        self._engine = engine
        self._retired = retired
        self.behind: LaunchedStep | None = None
        self.reading: LaunchedStep | None = None

    def __bool__(self) -> bool:
        return self.behind is not None or self.reading is not None

    def launched(self, step: LaunchedStep | None, *, overlaps: bool) -> None:
        """Notes that `step` was launched, while nothing was read; None: nothing more was. overlaps: it is read once the
        next step has been launched."""
        if overlaps:
            self.reading, self.behind = self.behind, step
        else:
            self.reading = step

    def release(self, request: DecodeRequest) -> None:
        """Removes the sequence of a request that has ended, once no step has a row of it any more. After its first
        token a head may still compute its prompt."""
        for step in (self.behind, self.reading):  # the later one first
            if step is not None and request in step.requests:
                step.released.append(request.sequence_id)
                return
        self._retired.add(request.sequence_id)

    def done(self, step: LaunchedStep) -> None:
        """Notes that nothing of the step is under way any more."""
        for sequence_id in step.released:
            self._engine.free(sequence_id)

    def drop(self) -> None:
        """Drops the steps: all have failed and are done."""
        steps, self.behind, self.reading = (self.reading, self.behind), None, None
        for step in steps:
            if step is not None:
                self.done(step)
