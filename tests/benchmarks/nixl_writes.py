"""Pages written by NIXL, which other servers move their KV with, from one process into another's memory.

Needs the package nixl (`pip install 'nixl[cu13]'`), whose own backend UCX does the writes.
"""

import importlib.util
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tandem.cache.plan.arrays import Int32Array

NOT_INSTALLED = "not measured: the package is not installed; pip install 'nixl[cu13]'"
WAIT_SECONDS = 30.0

Handle = tuple[bytes, int, int]  # the agent's metadata, where its pages begin, on which device


def is_installed() -> bool:
    return importlib.util.find_spec("nixl") is not None


class NixlPages:
    """One side's pages `[num_pages, …]`, contiguous, in blocks of a page's `blocks_per_page`-th part.

    As servers do, all blocks are registered and described once; a write names those it takes. Both sides are made
    alike, tell each other their handles, and connect(). The memory belongs to the caller, and outlives close().
    """

    def __init__(self, name: str, peer: str, pages: Tensor, blocks_per_page: int, threads: int) -> None:
        """threads: of UCX, beside NIXL's own that makes progress; 0 for none."""
        from nixl import nixl_agent, nixl_agent_config  # pyright: ignore[reportMissingImports]  # optional

        self._pages, self._peer, self._per_page = pages, peer, blocks_per_page
        self._kind = "VRAM" if pages.is_cuda else "DRAM"
        self._agent: Any = nixl_agent(name, nixl_agent_config(num_threads=threads))
        self._registered = self._agent.register_memory(pages)
        self._own: Any = None
        self._peers: Any = None

    @property
    def handle(self) -> Handle:
        return self._agent.get_agent_metadata(), self._pages.data_ptr(), max(0, self._pages.get_device())

    def connect(self, peer: Handle) -> None:
        metadata, begin, device = peer
        self._agent.add_remote_agent(metadata)
        _, own_begin, own_device = self.handle
        self._own = self._describe("NIXL_INIT_AGENT", own_begin, own_device)
        self._peers = self._describe(self._peer, begin, device)

    def write(self, source: Int32Array, target: Int32Array, note: bytes) -> float:
        """Pages source[i] to the peer's target[i], done when it returns, and then the note; how many of the seconds
        went into making the request."""
        began = time.perf_counter()
        request = self._agent.make_prepped_xfer(
            "WRITE", self._own, self._blocks(source), self._peers, self._blocks(target), note
        )
        made = time.perf_counter() - began
        state = self._agent.transfer(request)
        while state == "PROC" and time.perf_counter() < began + WAIT_SECONDS:
            state = self._agent.check_xfer_state(request)
        if state != "DONE":
            raise SystemExit(f"NIXL: a WRITE of {source.size} pages is {state} after {WAIT_SECONDS:g} s")
        request.release()
        return made

    def wait_for(self, note: bytes) -> None:
        """Returns once the peer's write with that note has landed here."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not self._agent.check_remote_xfer_done(self._peer, note):
            if time.monotonic() > deadline:
                raise SystemExit(f"NIXL: the note {note!r} did not come within {WAIT_SECONDS:g} s")

    def close(self) -> None:
        """When both sides are done."""
        for described in (self._own, self._peers):
            described.release()
        self._agent.remove_remote_agent(self._peer)
        self._agent.deregister_memory(self._registered)

    def _describe(self, agent: str, begin: int, device: int) -> Any:
        count = self._pages.shape[0] * self._per_page
        size = self._pages.nbytes // count
        blocks = np.empty((count, 3), np.uint64)
        blocks[:, 0] = begin + size * np.arange(count, dtype=np.uint64)
        blocks[:, 1], blocks[:, 2] = size, device
        return self._agent.prep_xfer_dlist(agent, blocks, self._kind)

    def _blocks(self, pages: Int32Array) -> NDArray[np.int32]:
        """Returns the first block of all pages, then the second of all pages, …: no two that follow each other are
        neighbours in memory, as if each layer had a tensor of its own."""
        parts = np.arange(self._per_page, dtype=np.int32)[:, None]
        return (pages[None, :] * self._per_page + parts).reshape(-1)


@contextmanager
def connected(pe: int, pages: Tensor, blocks_per_page: int, threads: int, exchange: Any) -> Iterator[NixlPages]:
    """PE 0's and PE 1's side. exchange(value): both sides' values, in the order of their PEs."""
    name = f"{blocks_per_page}-{threads}"
    side = NixlPages(f"{name}-{pe}", f"{name}-{1 - pe}", pages, blocks_per_page, threads)
    side.connect(exchange(side.handle)[1 - pe])
    exchange(None)
    yield side
    exchange(None)  # neither lets go while the other still uses it
    side.close()
