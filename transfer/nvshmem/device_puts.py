"""Writes to PEs whose memory is not mapped here, by puts that kernels of this PE issue."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.cache.kernels.upload import upload
from tandem.transfer.copy_plan import CopyPlan

# The kernels of device_puts.cu and their parameters, 64 bits each, in order.
KERNELS = {
    "put_runs": ("target", "source", "target_offsets", "source_offsets", "sizes", "num_runs", "pe"),
    "put_slots": (
        *("target", "source", "target_slots", "source_slots", "num_slots", "rows", "page_size", "row_bytes", "pe"),
    ),
    "put_tokens": (
        *("target", "source", "slots", "planes", "num_tokens", "heads", "first_row"),
        *("page_bytes", "page_size", "row_bytes", "pe"),
    ),
    "quiet": (),
    "post_row": ("signals", "num_signals", "row", "signal", "payload", "pe"),
}
BLOCKS, THREADS = 64, 256
ALIGNMENT = 16
STAGING_BYTES = 64 << 20


class DevicePuts:
    """Launches device_puts.cu. All tensors are this PE's symmetric ones: a peer's have the same symmetric addresses.

    Everything queues on the current stream. Puts are complete after a later quiet() or post_row(), whatever streams
    they were issued on before. A NIC reads registered memory only, so k and v go by way of `staging` (uint8
    [n]; STAGING_BYTES suit), which put_tokens fills in order of the calls: they must all come from one stream.
    """

    def __init__(self, library: Any, mailbox: Tensor, staging: Tensor) -> None:
        """library: the cubin as a cuda.core ObjectCode, known to NVSHMEM; kept alive for as long as this is."""
        from cuda.core import (  # pyright: ignore[reportMissingImports]  # comes with nvshmem4py
            LaunchConfig,
            Stream,
            launch,
        )

        self._config, self._stream, self._launch = LaunchConfig, Stream.from_handle, launch
        self._library = library
        self._kernels = {name: library.get_kernel(name) for name in KERNELS}
        self._mailbox = mailbox
        self._staging = staging
        self._staged = 0  # bytes of it that puts since the last quiet may still read

    def put(self, pe: int, pool: Tensor, plan: CopyPlan) -> None:
        """All of a plan, within pools that lie alike: runs of whole pages, and all layers of single slots."""
        if plan.num_pages.size:
            num_runs, pages = plan.num_pages.size, (plan.target_pages, plan.source_pages, plan.num_pages)
            runs = [part.astype(np.int64) * pool[0].nbytes for part in pages]
            names = ("target_offsets", "source_offsets", "sizes")
            arrays = dict(zip(names, upload(runs, pool.device), strict=True))
            grid = (min(num_runs, BLOCKS), max(1, BLOCKS // num_runs), 1)
            self._run("put_runs", grid, target=pool, source=pool, num_runs=num_runs, pe=pe, **arrays)
        if plan.source_slots.size:
            targets, sources = upload([plan.target_slots, plan.source_slots], pool.device)
            arrays = {"target_slots": targets, "source_slots": sources, "num_slots": plan.source_slots.size}
            self._run("put_slots", BLOCKS, target=pool, source=pool, pe=pe, **arrays, **_extents(pool))

    def put_tokens(
        self, pe: int, pool: Tensor, layer: int, k: Tensor, v: Tensor | None, tokens: Tensor, slots: Tensor
    ) -> None:
        """Rows tokens (int64 [n]) of k and v [num_tokens, num_kv_heads, head_dim] to slots (int32 [n]) of a layer.

        v is None exactly where the pool has one plane.
        """
        planes = (k,) if v is None else (k, v)
        limit = self._staging.nbytes // (len(planes) * k[0].nbytes)
        for some, targets in zip(tokens.split(limit), slots.split(limit), strict=True):
            self._put_staged(pe, pool, layer, planes, some, targets)

    def quiet(self) -> None:
        self._run("quiet", 1, threads=1)

    def post_row(self, pe: int, row: int, signal: int, payload: int) -> None:
        """Posts the payload after all puts, and then the signal."""
        words = {"row": row, "signal": signal, "payload": payload, "pe": pe}
        self._run("post_row", 1, threads=1, signals=self._mailbox, num_signals=self._mailbox.shape[1], **words)

    def _put_staged(
        self, pe: int, pool: Tensor, layer: int, planes: tuple[Tensor, ...], tokens: Tensor, slots: Tensor
    ) -> None:
        number, count, heads = len(planes), tokens.shape[0], pool.shape[3]
        num_bytes = number * count * planes[0][0].nbytes
        if self._staged + num_bytes > self._staging.nbytes:
            self.quiet()
            self._staged = 0
        staged = self._staging[self._staged : self._staged + num_bytes].view(pool.dtype).view(number, count, heads, -1)
        self._staged += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        for values, out in zip(planes, staged, strict=True):
            torch.index_select(values, 0, tokens, out=out)
        sizes = {"planes": number, "num_tokens": count, "heads": heads, "first_row": layer * number * heads}
        self._run("put_tokens", BLOCKS, target=pool, source=staged, slots=slots, pe=pe, **sizes, **_extents(pool))

    def _run(
        self, kernel: str, grid: int | tuple[int, int, int], *, threads: int = THREADS, **arguments: Tensor | int
    ) -> None:
        ordered = [arguments[name] for name in KERNELS[kernel]]
        values = [value.data_ptr() if isinstance(value, Tensor) else int(value) for value in ordered]
        stream = self._stream(torch.cuda.current_stream().cuda_stream)
        self._launch(stream, self._config(grid=grid, block=threads), self._kernels[kernel], *values)


def _extents(pool: Tensor) -> dict[str, int]:
    """rows: of a slot over all layers; page_size: positions of a page; bytes of a page and of a row."""
    _, layers, planes, heads, page_size, head_dim = pool.shape
    rows, row_bytes = layers * planes * heads, head_dim * pool.element_size()
    return {"rows": rows, "page_size": page_size, "row_bytes": row_bytes, "page_bytes": rows * page_size * row_bytes}
