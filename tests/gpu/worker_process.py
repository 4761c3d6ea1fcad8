"""Whole workers in processes of their own, on GPUs, and a look into their pages."""

import os
from functools import partial

import numpy as np
import torch

from tandem.cache.plan.arrays import Int32Array
from tandem.cluster.processes.gpus import VARIABLE, with_peers
from tandem.transfer.factory import create_transport
from tandem.transfer.membership import TransportConfig
from tandem.transfer.page_pool import movable
from tandem.transfer.transport import Transport
from tandem.workers.config import WorkerConfig
from tandem.workers.following import worker_ranks
from tandem.workers.runner.forward_graphs import ForwardGraphs
from tandem.workers.worker import Worker
from tests.gpu.pe_process import as_array, gpu_of, name_of_gpu
from tests.support.poison import poison_free_pages

PROBE = 1 << 20  # a sequence id that no request has


class WorkerPe:
    """See Pe: every public method can be called by name."""

    def __init__(self, pe: int) -> None:
        # As Ray and WorkerActor do: a worker's GPU is the first it sees, in all its threads.
        os.environ[VARIABLE] = with_peers(name_of_gpu(gpu_of(pe)))
        self._swapped: ForwardGraphs | None = None

    def load(self, config: WorkerConfig, peer_access: bool) -> None:
        """peer_access: whether its transports map other PEs."""
        self.worker = Worker(config, partial(_create, peer_access=peer_access))
        self.worker.load()

    def open(self, num_pages: int) -> bytes:
        return self.worker.open(num_pages)

    def join(self, handles: list[bytes]) -> None:
        self.worker.join(handles)

    def serve(self) -> str:
        return self.worker.serve()

    def poison(self) -> None:
        """NaN in pages that nobody holds, from now on."""
        self.worker.on_step_thread(lambda: poison_free_pages(self.worker.cache, self.worker.pools))

    def hurry(self, seconds: float) -> None:
        """Limits the seconds for which ranks wait for each other, in islands that are yet to form."""
        worker_ranks.WAIT_SECONDS = seconds

    def gpu(self) -> str:
        """Returns the id of the GPU on which it computes."""
        return str(torch.cuda.get_device_properties(self.worker.pools[0].device).uuid)

    def lost(self) -> str:
        return self.worker.lost

    def is_mapped(self, pe: int) -> bool:
        """Whether that PE's pages are."""
        return self.worker.on_step_thread(lambda: self._transport.peer_pool(pe, 0) is not None)

    def leave(self) -> None:
        self.worker.leave()

    def rejoin(self, config: WorkerConfig) -> None:
        self.worker.rejoin(config)

    def stop(self) -> None:
        self.worker.stop()

    def at_slots(self, slots: Int32Array) -> list[np.ndarray]:
        """Returns for each layer and plane the bits of these slots, [n, num_kv_heads, bytes]."""
        pool = movable(*self.worker.pools)
        _, layers, planes, _, page_size, _ = pool.shape
        pages, offsets = np.divmod(slots, page_size)
        values = pool[torch.from_numpy(pages).long(), :, :, :, torch.from_numpy(offsets).long()]
        return [as_array(values[:, layer, plane]) for layer in range(layers) for plane in range(planes)]

    def slots_of_prefix(self, token_ids: list[int]) -> Int32Array:
        """Returns the slots of the full pages that this worker keeps of a prompt."""

        def look_up() -> Int32Array:
            cache = self.worker.cache
            cache.add_sequence(PROBE)
            cache.match_prefix(PROBE, token_ids)
            (group,) = cache._table.groups
            pages = group.held(cache._table.row(PROBE), 0)
            cache.remove_sequence(PROBE)
            page_size = cache.layout.page_size
            return (pages[:, None] * page_size + np.arange(page_size, dtype=np.int32)).reshape(-1)

        return self.worker.on_step_thread(look_up)

    def swap_prompt_graphs(self) -> None:
        """Removes the prompt graphs, or puts them back."""
        loop = self.worker._loop
        assert loop is not None
        runner = loop.engine._runner
        self._swapped, runner._prompt_graphs = runner._prompt_graphs, self._swapped

    @property
    def _transport(self) -> Transport:
        assert self.worker._opened is not None, "open() comes first"
        return self.worker._opened


def _create(name: str, config: TransportConfig, *, peer_access: bool) -> Transport:
    if name != "nvshmem":
        return create_transport(name, config)
    from tandem.transfer.nvshmem.transport import NvshmemTransport

    return NvshmemTransport(config, peer_access=peer_access)
