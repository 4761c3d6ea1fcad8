"""Whole workers in processes of their own, each with a GPU, and a look into their pages."""

import os
from functools import partial

import numpy as np
import torch

from tandem.cache.position_map import Int32Array
from tandem.transfer.membership import TransportConfig
from tandem.transfer.transport import Transport
from tandem.workers import worker as worker_module
from tandem.workers.config import WorkerConfig
from tandem.workers.worker import Worker
from tests.gpu.pe_process import as_array


class WorkerPe:
    """See Pe: every public method can be called by name."""

    def __init__(self, pe: int) -> None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(pe)  # as Ray does: a worker has one GPU, in all its threads

    def open(self, config: WorkerConfig, num_pages: int, peer_access: bool) -> bytes:
        worker_module.create_transport = partial(_create, peer_access=peer_access)
        self.worker = Worker(config)
        self.worker.load()
        return self.worker.open(num_pages)

    def join(self, handles: list[bytes]) -> None:
        self.worker.join(handles)

    def serve(self) -> str:
        return self.worker.serve()

    def stop(self) -> None:
        self.worker.stop()

    def at_slots(self, slots: Int32Array) -> list[np.ndarray]:
        """Per layer and for K and V the bits of these slots, [n, num_kv_heads, bytes]."""
        (pool,) = self.worker.pools
        pages, offsets = np.divmod(slots, pool.shape[4])
        values = pool[torch.from_numpy(pages).long(), :, :, :, torch.from_numpy(offsets).long()]
        return [as_array(values[:, layer, part]) for layer in range(pool.shape[1]) for part in range(2)]

    def of_prefix(self, token_ids: list[int]) -> list[np.ndarray]:
        """The same of the full pages that this worker keeps of a prompt."""

        def gather() -> list[np.ndarray]:
            cache = self.worker.cache
            cache.add_sequence(-5)
            length = cache.match_prefix(-5, token_ids)
            layers = cache.gather_kv(-5, 0, length)
            cache.remove_sequence(-5)
            return [as_array(values) for layer in layers for values in layer]

        return self.worker.on_step_thread(gather)


def _create(name: str, config: TransportConfig, *, peer_access: bool) -> Transport:
    from tandem.transfer.nvshmem import NvshmemTransport

    return NvshmemTransport(config, peer_access=peer_access)
