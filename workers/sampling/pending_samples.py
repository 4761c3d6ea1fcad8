"""Sampled tokens on their way from the device to the host."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.cache.plan.arrays import Int32Array
from tandem.workers.sampling.token_logprobs import Logprobs, TokenLogprobs, split_logprobs


@dataclass(frozen=True, eq=False)
class Samples:
    """The tokens of n rows."""

    token_ids: NDArray[np.int64]  # [n]
    logprobs: list[TokenLogprobs | None]  # [n], None where a row did not ask


class PendingSamples(Protocol):
    """The tokens that one step samples."""

    def is_done(self) -> bool:
        """Whether wait() returns at once; raises what the device reports."""
        ...

    def wait(self) -> Samples:
        """Blocks until the step is done; raises what the device reports."""
        ...


class LateSamples:
    """Samples of a guided step: its forward is launched, and samples once the masks of its rows are known."""

    def __init__(self, launch: Callable[[Int32Array], PendingSamples]) -> None:
        """launch: samples with the masks, see masks_of()."""
        self._launch = launch
        self._launched: PendingSamples | None = None

    def launch(self, masks: Int32Array) -> None:
        """Launches the samples, once. Before it the device samples nothing."""
        self._launched = self._launch(masks)

    def is_done(self) -> bool:
        return self._launched is not None and self._launched.is_done()

    def wait(self) -> Samples:
        assert self._launched is not None, "the step's masks come first"
        return self._launched.wait()


class CopiedSamples:
    """Samples whose copies are queued when this is made, after the work on the current stream. wait() awaits them."""

    def __init__(self, tokens: Tensor, logprobs: Logprobs | None) -> None:
        """tokens int64 [n] and logprobs, on the device: free to change once later work is queued on the stream."""
        self._token_ids = tokens.numpy().copy() if tokens.is_cpu else to_host(tokens).numpy()
        self._logprobs = None
        if logprobs is not None:
            names = ("chosen", "top_ids", "top_logprobs")
            on_host: dict[str, Any] = {name: to_host(getattr(logprobs, name)) for name in names}
            self._logprobs = replace(logprobs, **on_host)
        self._copied = None
        if tokens.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def is_done(self) -> bool:
        return self._copied is None or self._copied.query()

    def wait(self) -> Samples:
        if self._copied is not None:
            self._copied.synchronize()
        return Samples(self._token_ids, split_logprobs(self._logprobs, self._token_ids))


def to_host(tensor: Tensor) -> Tensor:
    """A copy, queued on the current stream: it is there once work queued after it is done."""
    if tensor.is_cpu:
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
