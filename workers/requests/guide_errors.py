"""Returns the error for the caller of a guided request whose masks end."""

from tandem.workers.errors import ForwardFailed, InvalidCall, WorkerError
from tandem.workers.sampling.guided import Constraint, GuideNotFollowed


def guide_error(constraint: Constraint | None) -> WorkerError | None:
    """Returns None while there are masks, or where there is no grammar."""
    if constraint is None or constraint.error is None:
        return None
    error = constraint.error
    if isinstance(error, GuideNotFollowed):
        return InvalidCall(f"sampling.guided: {error}")
    return ForwardFailed(f"a mask could not be computed: {str(error) or type(error).__name__}")
