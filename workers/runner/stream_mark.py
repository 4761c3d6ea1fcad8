"""A place in what was launched on a device."""

from collections.abc import Callable, Sequence
from functools import partial

import torch


def mark_stream(device: torch.device) -> Callable[[], bool] | None:
    """See ModelRunner.mark."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))

    def is_past() -> bool:
        try:
            return event.query()
        except RuntimeError:
            return True

    return None if is_past() else is_past


def all_past(*marks: Callable[[], bool] | None) -> Callable[[], bool] | None:
    """Returns a function that tells whether the device is past all of several marks; None if all marks are None."""
    given = [is_past for is_past in marks if is_past is not None]
    if len(given) < 2:
        return given[0] if given else None
    return partial(_are_past, given)


def _are_past(marks: Sequence[Callable[[], bool]]) -> bool:
    return all(is_past() for is_past in marks)
