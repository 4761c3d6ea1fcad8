"""Memory for a step's arrays that the step itself fetches from the host."""

import time

import torch

from tandem.cache.kernels.staging import ALIGNMENT

POLL_SECONDS = 0.00001


class FetchedStaging:
    """A Staging whose copy is a kernel, fetch(), of the CUDA graph that reads the arrays: between two graphs the device
    then has nothing to do. On a CPU both sides are one memory.

        host       filling | pairs of numbers | numbers ...        written by open(), the caller, send()
                      |                             |
        fetched  <----+   when all have been        +---->  on_device
                          read: open() goes on

    Its memory may go only when nothing on the stream is under way.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        size = ALIGNMENT + _whole(num_bytes)
        self._memory = torch.zeros(size, dtype=torch.uint8, pin_memory=self._on_gpu)
        self.host = self._memory[ALIGNMENT:]
        self.on_device = torch.zeros_like(self.host, device=device) if self._on_gpu else self.host
        self._head = self._memory[:ALIGNMENT].view(torch.int64).numpy()
        self._finished = torch.zeros(1, dtype=torch.int32, device=device)
        self._fetched = torch.zeros(1, dtype=torch.int64, pin_memory=self._on_gpu)
        self._seen = self._fetched.numpy()

    def open(self) -> None:
        """Returns once what was sent last is fetched, or nothing is left that could fetch it; raises what the device
        reports."""
        if self._on_gpu:
            stream = torch.cuda.current_stream()
            while self._seen[0] != self._head[0] and not stream.query():
                time.sleep(POLL_SECONDS)

    def send(self, num_bytes: int) -> None:
        """The first num_bytes of the host's side are what the next fetch() is for."""
        self._head[:] = self._head[0] + 1, _whole(num_bytes) // ALIGNMENT

    def fetch(self, num_bytes: int) -> None:
        """Launches the kernel: num_bytes, those that a send() says, at most."""
        if not self._on_gpu:
            return
        from tandem.cache.kernels.triton_fetch import fetch  # triton may be missing elsewhere

        on_device = self.on_device[: _whole(num_bytes)].view(torch.int64)
        fetch(self._memory.view(torch.int64), on_device, self._finished, self._fetched)


def _whole(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
