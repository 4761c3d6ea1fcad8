"""A decode step of few rows, from their embeddings to their logits, in one launch: row_step.cu."""

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from tandem.cache.kernels.base import StepPages
from tandem.cache.plan.kv_scales import FP8
from tandem.workers.kernels.cuda.cubin_build import load_cubin
from tandem.workers.kernels.cuda.driver import Module

SOURCE = Path(__file__).with_name("row_step.cu")
WARPS = 16
SHARED_BYTES = 227 * 1024  # SHARED_BYTES of row_step.cu
SLOT_BYTES = 4096  # SLOT
MAX_GROUP = 8  # q heads of a KV head: their sums must fit into registers
ENDS = 4  # words beside a head's sums
SHARES_OF_HEAD = 16
ROW_COUNTS = (1, 2, 4, 8)
INPUT_BYTES = 64 * 1024  # that a block gathers of several rows for a product; kernels of each layer are faster beyond

POINTER, INT64, INT32, FLOAT = ctypes.c_void_p, ctypes.c_longlong, ctypes.c_int, ctypes.c_float


@dataclass(frozen=True, slots=True, eq=False)
class RowStepLayer:
    """A layer's tensors, in the order of row_step.cu's pointers; see LayerParameters. head_norms: [Hq + Hkv, D]."""

    qkv: Tensor
    qkv_bias: Tensor | None
    o: Tensor
    gate_up: Tensor
    down: Tensor
    input_norm: Tensor
    post_norm: Tensor
    head_norms: Tensor | None

    def addresses(self) -> list[int]:
        return [_address(getattr(self, field.name)) for field in fields(self)]


@dataclass(frozen=True, slots=True)
class RowStepShape:
    """Of a model whose layers have K and V and a gated feed-forward with silu; dtype: of all its tensors. stored: of K
    and V in their pages, float8_e4m3fn or as they come."""

    hidden: int
    inner: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    dtype: torch.dtype
    stored: torch.dtype

    def fits(self, blocks: int, rows: int) -> bool:
        """Whether `blocks` blocks should compute a step of `rows` rows: rows of whole 16 bytes, outputs for each block
        always, a block for each row and KV head, and of several rows inputs that are gathered fast."""
        sizes, tile = (self.hidden, self.inner, self.q_heads * self.head_dim), _tile(rows)
        widest = max(self.hidden, self.q_heads * self.head_dim)  # `down` gathers its input in pieces
        return (
            self.dtype in (torch.float16, torch.bfloat16)
            and self.stored in (self.dtype, FP8)
            and self.head_dim in (64, 128)
            and self.q_heads // self.kv_heads <= MAX_GROUP
            and all(size % 8 == 0 for size in sizes)
            and self.vocab % tile == 0
            and min(*sizes, self.vocab) >= tile * blocks
            and blocks >= rows * self.kv_heads
            and (rows == 1 or rows * widest * 2 <= INPUT_BYTES)
        )

    def share(self, rows: int) -> int:
        """SHARE of row_shape.cuh: positions that lie on one page."""
        return 8 if rows == 1 else min(SLOT_BYTES // (2 * self.head_dim * self.stored.itemsize), 16)

    def defines(self, blocks: int, warps: int, rows: int) -> tuple[str, ...]:
        """For the compiler."""
        values = {
            "ROWS": rows,
            "HIDDEN": self.hidden,
            "INNER": self.inner,
            "Q_HEADS": self.q_heads,
            "KV_HEADS": self.kv_heads,
            "HEAD_DIM": self.head_dim,
            "BLOCKS": blocks,
            "WARPS": warps,
            "HALF": int(self.dtype == torch.float16),
            "FP8": int(self.stored == FP8),
        }
        return tuple(f"-D{name}={value}" for name, value in values.items())

    def num_words(self, rows: int) -> int:
        """Of what blocks tell each other in two layers: of 32 bits, most of them pairs of numbers."""
        heads = self.q_heads * self.head_dim
        parts = SHARES_OF_HEAD * self.q_heads * (self.head_dim + ENDS)
        return rows * (2 * self.hidden + 2 * heads + 2 * self.kv_heads * self.head_dim + self.inner) + 2 * parts


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _tile(rows: int) -> int:
    """TILE of row_shape.cuh."""
    return 2 if rows == 1 else 4


class StepArguments(ctypes.Structure):
    """struct Step of row_step.cu."""

    _fields_ = (
        *((name, POINTER) for name in ("layers", "x", "final_norm", "lm_head", "cos", "sin", "scales", "logits")),
        *((name, POINTER) for name in ("pool", "slots", "kv_indptr", "kv_indices", "kv_last_page_len")),
        *((name, POINTER) for name in ("words", "epoch")),
        *(("page_elements", INT64), ("layer_elements", INT64)),
        *(("num_layers", INT32), ("vocab", INT32), ("page_size", INT32)),
        *(("eps", FLOAT), ("head_eps", FLOAT), ("scale", FLOAT)),
    )


Launch = Callable[[StepArguments], None]
"""Runs the kernel on the current stream with what the arguments are when it is called."""


class RowStep:
    """The weights of a model in the form that the kernel reads, and the words that its blocks exchange.

    One step at a time: calls must queue on one stream. A kernel that waits nine seconds for another block ends with an
    error of the device.
    """

    def __init__(
        self,
        shape: RowStepShape,
        rows: int,
        layers: Sequence[RowStepLayer],
        final_norm: Tensor,
        lm_head: Tensor,
        eps: float,
        launch: Launch,
    ) -> None:
        """rows: of each step. All tensors are contiguous, of the shape's dtype and on one device. eps: of all norms."""
        self._shape = shape
        self._rows = rows
        self._layers = layers  # keeps alive what the table points to
        self._final_norm = final_norm
        self._lm_head = lm_head
        self._eps = eps
        self._launch = launch
        device = lm_head.device
        self._table = torch.tensor([layer.addresses() for layer in layers], dtype=torch.int64, device=device)
        self._words = torch.full((shape.num_words(rows),), -1, dtype=torch.int32, device=device)  # NONE
        self._epoch = torch.zeros(2, dtype=torch.int32, device=device)  # layers before; blocks done

    def __call__(self, x: Tensor, pages: StepPages) -> Tensor:
        """Logits [rows, vocab] that follow the tokens with embeddings x [rows, hidden]; their K and V go into their
        slots.

        pages: of as many sequences, a pool of all layers and a rotation of whole heads; see takes().
        """
        logits = torch.empty((self._rows, self._shape.vocab), dtype=x.dtype, device=x.device)
        tables, rotation = pages.tables, pages.rotation
        tensors = (self._table, x, self._final_norm, self._lm_head, rotation.cos, rotation.signed_sin)
        of_pages = (pages.pool, tables.slots, tables.kv_indptr, tables.kv_indices, tables.kv_last_page_len)
        self._launch(
            StepArguments(
                *map(_address, (*tensors, pages.scales, logits, *of_pages, self._words, self._epoch)),
                *(pages.pool.stride(0), pages.pool.stride(1)),
                *(len(self._layers), self._shape.vocab, pages.pool.shape[4], self._eps, self._eps, pages.scale),
            )
        )
        return logits

    def takes(self, pages: StepPages) -> bool:
        """Whether it attends to such pages."""
        rotary_dim, page_size = pages.rotation.cos.shape[-1], pages.pool.shape[4]
        return (
            pages.tables.slots.shape[0] == self._rows
            and pages.pool.dtype == self._shape.stored
            and pages.pool.shape[1] == len(self._layers)
            and rotary_dim == self._shape.head_dim
            and page_size % self._shape.share(self._rows) == 0
        )


class CudaLaunch:
    """The kernel on a GPU: a block on each multiprocessor, all of them at once."""

    def __init__(self, cubin: bytes, blocks: int, warps: int) -> None:
        """For the current device, whose context exists."""
        self._module = Module(cubin)
        self._blocks, self._threads = blocks, 32 * warps
        self._kernel = self._module.function("row_step", SHARED_BYTES)

    def __call__(self, arguments: StepArguments) -> None:
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        sizes = (self._blocks, 1, 1, self._threads, 1, 1, SHARED_BYTES)
        self._module.check("cuLaunchCooperativeKernel", self._kernel, *sizes, stream, parameters)


def load_launches(shape: RowStepShape, device: torch.device) -> dict[int, CudaLaunch]:
    """By number of rows: those that device and shape suit, and that can be compiled, which takes seconds once, all at
    the same time."""
    properties = torch.cuda.get_device_properties(device)
    capability, blocks = (properties.major, properties.minor), properties.multi_processor_count
    counts = [rows for rows in ROW_COUNTS if capability >= (9, 0) and shape.fits(blocks, rows)]
    arch = "".join(map(str, capability))

    def load(rows: int) -> bytes | None:
        return load_cubin(SOURCE, shape.defines(blocks, WARPS, rows), arch, f"steps of {rows} rows take more kernels")

    with ThreadPoolExecutor(len(ROW_COUNTS)) as compilers:
        cubins = zip(counts, compilers.map(load, counts), strict=True)
    return {rows: CudaLaunch(cubin, blocks, WARPS) for rows, cubin in cubins if cubin is not None}
