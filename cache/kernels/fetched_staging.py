"""Memory for a step's arrays that is filled while the step before it runs."""

import time

import torch

from tandem.cache.kernels.staging import ALIGNMENT, aligned

POLL_SECONDS = 0.00001


class FetchedStaging:
    """A Staging that copies arrays to the device on a stream of its own, while others run there.

    A kernel of the CUDA graph that reads them, fetch(), copies them to their fixed addresses. So the device has nothing
    to do between two graphs. On a CPU both sides are one memory.

        host      filling | pairs of numbers | numbers ...     open(), the caller writes, send()
                     |  copied during the step before
        arrived      v
                     |  fetch()
        fetched  <---+--->  on_device

    fetched, in the host's memory, is the filling that all have been read of: then open() goes on. Its memory may go
    only when nothing is under way.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        size = ALIGNMENT + aligned(num_bytes)
        self._memory = torch.zeros(size, dtype=torch.uint8, pin_memory=self._on_gpu)
        self.host = self._memory[ALIGNMENT:]
        self._head = self._memory[:ALIGNMENT].view(torch.int64).numpy()
        self._fetched = torch.zeros(1, dtype=torch.int64, pin_memory=self._on_gpu)
        self._seen = self._fetched.numpy()
        self._finished = torch.zeros(1, dtype=torch.int32, device=device)
        self._arrived = torch.zeros_like(self._memory, device=device) if self._on_gpu else self._memory
        self.on_device = torch.zeros_like(self.host, device=device) if self._on_gpu else self.host
        self._stream = torch.cuda.Stream(device) if self._on_gpu else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))  # which zeroes what arrives

    def open(self) -> None:
        """Returns once what was sent last is fetched, or nothing is left that could fetch it; raises what the device
        reports."""
        if self._on_gpu:
            stream = torch.cuda.current_stream()
            while self._seen[0] != self._head[0] and not stream.query():
                time.sleep(POLL_SECONDS)

    def send(self, num_bytes: int) -> None:
        """The first num_bytes of the host's side are what the next fetch() on the current stream is for.

        Waits for the copy, some 10 µs of the step before: a graph that waits for an event starts as much later.
        """
        self._head[:] = self._head[0] + 1, aligned(num_bytes) // ALIGNMENT
        if self._stream is not None:
            end = ALIGNMENT + aligned(num_bytes)
            with torch.cuda.stream(self._stream):
                self._arrived[:end].copy_(self._memory[:end])

    def fetch(self, num_bytes: int) -> None:
        """Launches the kernel: num_bytes, those that a send() says, at most."""
        if not self._on_gpu:
            return
        from tandem.cache.kernels.triton.fetch import fetch  # triton may be missing elsewhere

        on_device = self.on_device[: aligned(num_bytes)].view(torch.int64)
        fetch(self._arrived.view(torch.int64), on_device, self._finished, self._fetched)
