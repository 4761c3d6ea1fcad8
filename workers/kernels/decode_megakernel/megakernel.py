"""A decode step of few rows, from their embeddings to their logits, in one launch: megakernel.cu.

This file is the home of the constants that host and device share. MegakernelShape.defines() gives them to the compiler,
and shape.cuh asserts what follows from them.
"""

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from tandem.cache.kernels.base import StepPages
from tandem.cache.plan.kv_scales import FP8
from tandem.workers.kernels.base import Linear, RmsNorm
from tandem.workers.kernels.cuda.cubin_build import Cubin, defines, load_cubin
from tandem.workers.kernels.cuda.driver import Function, Module

SOURCE = Path(__file__).with_name("megakernel.cu")
WARPS = 16
SHARED_BYTES = 227 * 1024
STAGE_BYTES = 4096  # of a warp's ring
MAX_GROUP = 8  # q heads of a KV head: their accumulators must fit into registers
STATS = 4  # words next to a head's accumulator: row_max, then row_sum thrice
MAX_SPLITS = 16  # of a KV head's positions
ROW_COUNTS = (1, 2, 4, 8)
MAX_TAPS = 3
SCALED_COLUMNS = 128  # of a weight in 8 bits, that share a scale, unless all do
INPUT_LIMIT = 64 * 1024  # bytes that a block gathers of several rows for a product; other kernels are faster beyond

POINTER, INT64, INT32, FLOAT = ctypes.c_void_p, ctypes.c_longlong, ctypes.c_int, ctypes.c_float


@dataclass(frozen=True, slots=True, eq=False)
class MegakernelLayer:
    """A layer's tensors, in the order of the pointers in shape.cuh; see LayerParameters. Scales: of 8 bits."""

    qkv: Tensor
    qkv_bias: Tensor | None
    o: Tensor
    gate_up: Tensor
    down: Tensor
    input_norm: Tensor
    post_norm: Tensor
    head_norms: Tensor | None  # [Hq + Hkv, D]
    scaling: int = 0  # a byte of each product, see _scaling()
    qkv_scales: Tensor | None = None
    o_scales: Tensor | None = None
    gate_up_scales: Tensor | None = None
    down_scales: Tensor | None = None

    @classmethod
    def of(
        cls, products: Sequence[Linear], input_norm: Tensor, post_norm: Tensor, head_norms: Tensor | None
    ) -> "MegakernelLayer | None":
        """products: qkv, o, gate and up, down. None where the kernel does not multiply by them: biases of others than
        qkv, unlike dtypes, groups of other sizes that share a scale."""
        qkv, o, gate_up, down = (product.weight for product in products)
        scaling = [bits for product in products if (bits := _scaling(product)) is not None]
        biased = any(product.bias is not None for product in products[1:])
        if biased or len({product.weight.dtype for product in products}) > 1 or len(scaling) < len(products):
            return None
        return cls(
            *(qkv, products[0].bias, o, gate_up, down, input_norm, post_norm, head_norms),
            sum(bits << 8 * index for index, bits in enumerate(scaling)),
            *(None if product.scaled is None else product.scaled.scales for product in products),
        )


@dataclass(frozen=True, slots=True)
class MegakernelShape:
    """The sizes of a model whose layers have K and V and a gated feed-forward with silu."""

    hidden: int
    intermediate: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    dtype: torch.dtype  # of all tensors but K, V and weights
    weights: torch.dtype  # of layers: dtype or float8_e4m3fn
    stored: torch.dtype  # of K and V in their pages: dtype or float8_e4m3fn

    def fits(self, blocks: int, rows: int) -> bool:
        """Whether `blocks` blocks should compute a step of `rows` rows.

        Rows must be of whole 16 bytes. Each block needs outputs in every phase, and each row and KV head needs a block.
        Inputs of several rows must be small enough to be gathered fast.
        """
        sizes, tile = (self.hidden, self.intermediate, self.q_heads * self.head_dim), _tile(rows)
        aligned = 16 // self.weights.itemsize
        widest = max(self.hidden, self.q_heads * self.head_dim)  # `down` gathers its input in pieces
        return (
            self.dtype in (torch.float16, torch.bfloat16)
            and self.weights in (self.dtype, FP8)
            and self.stored in (self.dtype, FP8)
            and self.head_dim in (64, 128)
            and self.q_heads // self.kv_heads <= MAX_GROUP
            and all(size % aligned == 0 for size in sizes)
            and self.vocab % tile == 0
            and min(*sizes, self.vocab) >= tile * blocks
            and blocks >= rows * self.kv_heads
            and (rows == 1 or rows * widest * 2 <= INPUT_LIMIT)
        )

    def item_positions(self, rows: int) -> int:
        """The most positions that a warp fetches at once; they lie on one page."""
        return 8 if rows == 1 else min(STAGE_BYTES // (2 * self.head_dim * self.stored.itemsize), 16)

    def defines(self, blocks: int, warps: int, rows: int) -> tuple[str, ...]:
        """Options for the compiler; shape.cuh explains them."""
        return defines(
            ROWS=rows,
            HIDDEN=self.hidden,
            INTERMEDIATE=self.intermediate,
            Q_HEADS=self.q_heads,
            KV_HEADS=self.kv_heads,
            HEAD_DIM=self.head_dim,
            HALF=self.dtype == torch.float16,
            FP8=self.stored == FP8,
            WEIGHT8=self.weights == FP8,
            BLOCKS=blocks,
            WARPS=warps,
            SHARED_BYTES=SHARED_BYTES,
            TILE=_tile(rows),
            STAGE_BYTES=STAGE_BYTES,
            MAX_GROUP=MAX_GROUP,
            INPUT_LIMIT=INPUT_LIMIT,
            ITEM_POSITIONS=self.item_positions(rows),
            MAX_SPLITS=MAX_SPLITS,
            MAX_TAPS=MAX_TAPS,
            STATS=STATS,
            SCALED_COLUMNS=SCALED_COLUMNS,
            HOST_WORDS=self.num_words(rows),
            HOST_ARGUMENT_BYTES=ctypes.sizeof(MegakernelArguments),
            HOST_LAYER_POINTERS=len(fields(MegakernelLayer)),
        )

    def num_words(self, rows: int) -> int:
        """Returns the most words of 32 bits that two layers publish. Most words are pairs of numbers."""
        heads = self.q_heads * self.head_dim
        parts = MAX_SPLITS * self.q_heads * (self.head_dim + STATS)
        published = 2 * self.hidden + 2 * heads + 2 * self.kv_heads * self.head_dim + self.intermediate
        return rows * published + 2 * parts


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _word(value: Tensor | int | None) -> int:
    return value if isinstance(value, int) else _address(value)


def _scaling(product: Linear) -> int | None:
    """Returns how numbers share scales, for ScaleBlock of scales.cuh. The upper half of a byte has the rows of a scale,
    as a power of two. The lower half has 1 if SCALED_COLUMNS share one, 0 if all columns do. None: something else does.
    0: there are no scales."""
    scaled = product.scaled
    if scaled is None:
        return 0
    grouped, row_bits = scaled.scales.shape[1] > 1, scaled.row_block.bit_length() - 1
    if scaled.row_block != 1 << row_bits or row_bits > 15 or (grouped and scaled.group != SCALED_COLUMNS):
        return None
    return row_bits << 4 | int(grouped)


def _tile(rows: int) -> int:
    """Returns the outputs of a product that a warp computes at once."""
    return 2 if rows == 1 else 4


class MegakernelArguments(ctypes.Structure):
    """struct Arguments of shape.cuh: the same fields in the same order."""

    _fields_ = (
        *((name, POINTER) for name in ("layers", "x", "final_norm", "lm_head", "cos", "sin", "scales", "logits")),
        *((name, POINTER) for name in ("pool", "slots", "kv_indptr", "kv_indices", "kv_last_page_len")),
        ("preceding", POINTER),
        *((name, POINTER) for name in ("published", "epoch", "tapped")),
        *(("page_elements", INT64), ("layer_elements", INT64)),
        *(("num_layers", INT32), ("vocab", INT32), ("page_size", INT32)),
        ("taps", INT32 * MAX_TAPS),
        *(("eps", FLOAT), ("head_eps", FLOAT), ("scale", FLOAT)),
    )


Launch = Callable[[MegakernelArguments], None]
"""Runs the kernel on the current stream with what the arguments are when it is called."""


class DecodeMegakernel:
    """The weights of a model in the form that the kernel reads, and the activations that its blocks publish.

    One step at a time: calls must queue on one stream. A kernel that waits nine seconds for another block ends with an
    error of the device.
    """

    def __init__(
        self,
        shape: MegakernelShape,
        rows: int,
        layers: Sequence[MegakernelLayer],
        final_norm: RmsNorm,
        lm_head: Tensor,
        launch: Launch,
    ) -> None:
        """rows: of each step. All tensors are contiguous, of the shape's dtypes and on one device; all norms have
        the eps of final_norm."""
        self._shape = shape
        self._rows = rows
        self._layers = layers  # keeps alive what the table points to
        self._final_norm = final_norm
        self._lm_head = lm_head
        self._launch = launch
        device = lm_head.device
        table = [[_word(getattr(layer, field.name)) for field in fields(layer)] for layer in layers]
        self._table = torch.tensor(table, dtype=torch.int64, device=device)
        self._published = torch.full((shape.num_words(rows),), -1, dtype=torch.int32, device=device)  # NONE
        self._epoch = torch.zeros(2, dtype=torch.int32, device=device)  # layers before; blocks done

    def __call__(self, x: Tensor, pages: StepPages, taps: Sequence[int] = ()) -> tuple[Tensor, Tensor | None]:
        """Logits [rows, vocab] that follow the tokens with embeddings x [rows, hidden]. Stores their K and V.

        pages: of as many sequences, a pool of all layers and a rotation of whole heads; see takes(). taps: layers but
        the first, up to MAX_TAPS, whose inputs are wanted, too: [rows, taps · hidden], one after another.
        """
        logits = torch.empty((self._rows, self._shape.vocab), dtype=x.dtype, device=x.device)
        tapped = None
        if taps:
            tapped = torch.empty((self._rows, MAX_TAPS, self._shape.hidden), dtype=x.dtype, device=x.device)
        tables, rotation, pool = pages.tables, pages.rotation, pages.pool
        eps, (page_elements, layer_elements, *_) = self._final_norm.eps, pool.stride()
        tensors = {
            **{"layers": self._table, "x": x, "final_norm": self._final_norm.weight, "lm_head": self._lm_head},
            **{"cos": rotation.cos, "sin": rotation.signed_sin, "scales": pages.scales, "logits": logits},
            **{"pool": pool, "slots": tables.slots, "kv_indptr": tables.kv_indptr, "kv_indices": tables.kv_indices},
            **{
                "kv_last_page_len": tables.kv_last_page_len,
                "preceding": tables.preceding,
                "published": self._published,
                "epoch": self._epoch,
                "tapped": tapped,
            },
        }
        sizes = {
            **{"page_elements": page_elements, "layer_elements": layer_elements, "page_size": pool.shape[4]},
            **{"num_layers": len(self._layers), "vocab": self._shape.vocab},
        }
        addresses = {name: _address(tensor) for name, tensor in tensors.items()}
        places = (INT32 * MAX_TAPS)(*taps)
        self._launch(MegakernelArguments(**addresses, **sizes, taps=places, eps=eps, head_eps=eps, scale=pages.scale))
        return logits, None if tapped is None else tapped[:, : len(taps)].flatten(1)

    def takes(self, pages: StepPages) -> bool:
        """Whether it attends to such pages."""
        rotary_dim, page_size = pages.rotation.cos.shape[-1], pages.pool.shape[4]
        return (
            pages.tables.slots.shape[0] == self._rows
            and pages.pool.dtype == self._shape.stored
            and pages.pool.shape[1] == len(self._layers)
            and rotary_dim == self._shape.head_dim
            and page_size % self._shape.item_positions(self._rows) == 0
        )


class MegakernelLaunch:
    """The kernel on a GPU: a block on each multiprocessor, all at once."""

    def __init__(self, cubin: bytes, blocks: int, warps: int) -> None:
        """Loads the kernel for the current device, whose context exists."""
        self._blocks = blocks
        self._kernel = Function(
            Module(cubin), "decode_megakernel", threads=32 * warps, shared_bytes=SHARED_BYTES, cooperative=True
        )

    def __call__(self, arguments: MegakernelArguments) -> None:
        self._kernel.launch(self._blocks, (arguments,))


def load_megakernels(shape: MegakernelShape, device: torch.device) -> dict[int, MegakernelLaunch]:
    """The kernels by number of rows, where they suit device and shape and can be compiled. That takes seconds once."""
    properties = torch.cuda.get_device_properties(device)
    blocks = properties.multi_processor_count
    planned = plan_megakernels(shape, (properties.major, properties.minor), blocks)

    def load(rows: int) -> bytes | None:
        return load_cubin(planned[rows], f"steps of {rows} rows take more kernels")

    with ThreadPoolExecutor(len(ROW_COUNTS)) as compilers:
        cubins = zip(planned, compilers.map(load, planned), strict=True)
    return {rows: MegakernelLaunch(cubin, blocks, WARPS) for rows, cubin in cubins if cubin is not None}


def plan_megakernels(shape: MegakernelShape, capability: tuple[int, int], multiprocessors: int) -> dict[int, Cubin]:
    """Returns the cubins to compile for a GPU, by number of rows; empty where device or shape does not suit."""
    arch, counts = "".join(map(str, capability)), ROW_COUNTS if capability >= (9, 0) else ()
    return {
        rows: Cubin(SOURCE, shape.defines(multiprocessors, WARPS, rows), arch)
        for rows in counts
        if shape.fits(multiprocessors, rows)
    }
