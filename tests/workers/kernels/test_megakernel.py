"""megakernel.cu on this machine's CPU (see emulated/device.h), through the decoder, against plain forwards by torch."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.cache.attention.forward import Batch
from tandem.cache.kernels.base import Capabilities, DeviceTables, GroupBuffers, GroupPlan, Limits, StepPages
from tandem.cache.kernels.scoring import Scoring
from tandem.cache.kernels.torch.kernels import TorchKernels
from tandem.cache.kinds.kv import KV
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.kv_scales import FP8, KVScales
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.rope import Rotation
from tandem.workers.kernels.base import RmsNorm, ScaledLinear
from tandem.workers.kernels.decode_megakernel.megakernel import DecodeMegakernel, Launch, MegakernelShape
from tandem.workers.models import small_batch_decoder
from tandem.workers.models.decoder import DenseDecoder
from tandem.workers.models.registry import load_config
from tandem.workers.models.weights import load_parameters
from tandem.workers.weights import fp8
from tests.support.checkpoints import make_model
from tests.support.fused_gemms import TorchFusedGemms
from tests.support.quantized_checkpoints import CHANNEL, DEEPSEEK, Quantize, blocks_of, by_rows, quantize_folder
from tests.support.tvm_cache import TvmCache
from tests.workers.kernels.emulated.library import COMPILER, library_builder

SOURCE = Path(__file__).parent / "emulated" / "megakernel.cpp"
WARPS = 8

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


@dataclass(frozen=True)
class Case:
    """changes: of the configuration. lengths: of the prompts; `active` are stepped at a time, in steps of `rows`. fp8:
    K and V are stored in 8 bits, by scales that differ. weights: layers' weights are in 8 bits, see SCHEMES.
    """

    family: str
    changes: dict[str, int]
    blocks: int
    page_size: int
    dtype: str
    lengths: tuple[int, ...]
    rows: int = 1
    active: int = 1
    defines: tuple[str, ...] = ()
    fp8: bool = False
    weights: str | None = None

    @property
    def tolerance(self) -> float:
        """The tolerance of results. A small difference in rounding may give the neighbouring entry of 8 bits. Models
        with weights in 8 bits are wider here and round more often; a wrong scale gives 0.1 and more."""
        if self.dtype == "bfloat16":
            return 0.025
        return 0.01 if self.fp8 else 0.003 if self.weights is None else 0.005

    def scales(self, num_layers: int, num_kv_heads: int) -> KVScales | None:
        layers = [tuple(0.01 + 0.004 * ((one + head) % 3) for head in range(num_kv_heads)) for one in range(num_layers)]
        return KVScales(tuple(layers), tuple(reversed(layers))) if self.fp8 else None


ONE_KV_HEAD = {"hidden_size": 96, "head_dim": 128, "num_attention_heads": 6, "num_key_value_heads": 1}
THREE_HEADS = ONE_KV_HEAD | {"num_attention_heads": 3}
TWO_KV_HEADS = {"hidden_size": 64, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
WIDE = TWO_KV_HEADS | {"hidden_size": 272}  # three blocks of 128, the last of fewer
SMALL_PIECES = ("-DINPUT_LIMIT=8192", "-DMANY_POSITIONS=20")
SCHEMES: dict[str, tuple[dict[str, Any], Quantize]] = {
    "blocks": (DEEPSEEK | {"weight_block_size": [128, 128]}, blocks_of((128, 128))),
    "rows": (CHANNEL, by_rows),
}
CASES = {
    "norms": Case("qwen3", {"hidden_size": 64, "head_dim": 64, "intermediate_size": 72}, 4, 16, "float16", (1, 100)),
    "biases": Case("qwen2", {"hidden_size": 64, "head_dim": 64, "intermediate_size": 1032}, 2, 8, "bfloat16", (40,)),
    "many heads": Case("llama", ONE_KV_HEAD, 3, 32, "float16", (90,)),
    "two rows": Case("qwen3", THREE_HEADS | {"intermediate_size": 72}, 3, 8, "float16", (100, 1, 30), 2, 2),
    "padding": Case("qwen3", TWO_KV_HEADS | {"intermediate_size": 1032}, 9, 16, "float16", (120, 9, 50), 4, 3),
    "pieces": Case(
        "qwen2", TWO_KV_HEADS | {"intermediate_size": 1096}, 8, 16, "bfloat16", (30, 9, 1, 100), 4, 4, SMALL_PIECES
    ),
    "8 bits": Case("qwen3", TWO_KV_HEADS | {"intermediate_size": 72}, 4, 16, "bfloat16", (1, 100), fp8=True),
    "8 bits, two rows": Case(
        "llama", THREE_HEADS, 3, 16, "float16", (100, 1, 30), 2, 2, ("-DMANY_POSITIONS=20",), fp8=True
    ),
    "eight rows": Case(
        "llama", TWO_KV_HEADS | {"num_attention_heads": 8}, 16, 32, "float16", (90, 1, 8, 9, 20, 120), 8, 6
    ),
    "weights of blocks": Case(
        "qwen2", WIDE | {"intermediate_size": 2064}, 3, 16, "bfloat16", (1, 40), weights="blocks"
    ),
    "weights of rows": Case(
        "qwen3", WIDE | {"intermediate_size": 80}, 4, 16, "float16", (1, 100), fp8=True, weights="rows"
    ),
    "weights of blocks, two rows": Case(
        *(
            "llama",
            THREE_HEADS | {"hidden_size": 288, "intermediate_size": 1040},
            3,
            16,
            "float16",
            (100, 1, 30),
            2,
            2,
        ),
        weights="blocks",
    ),
    "weights of blocks, pieces": Case(
        *("qwen2", WIDE | {"intermediate_size": 1104}, 8, 16, "bfloat16", (30, 9, 1, 100), 4, 4, SMALL_PIECES),
        weights="blocks",
    ),
    "weights of rows, eight rows": Case(
        *("llama", WIDE | {"num_attention_heads": 8}, 16, 32, "float16", (90, 1, 8, 9, 20, 120), 8, 6),
        weights="rows",
    ),
}


class OpenKernels(TorchKernels):
    """Forwards by torch, and steps by nobody but a kernel of all layers."""

    def __init__(self, pool: Tensor, scoring: Scoring, fp8: Any = None) -> None:
        super().__init__(pool, scoring, fp8)
        self.capabilities = Capabilities(step_graphs=True, verify_graphs=True)

    def buffers(self, limits: Limits, tables: DeviceTables) -> "OpenBuffers":
        return OpenBuffers(self, tables)


@dataclass(frozen=True, eq=False)
class OpenBuffers(GroupBuffers):
    """The kernel reads all that it needs from the arrays. No layer is attended to by itself."""

    kernels: OpenKernels
    tables: DeviceTables

    def step_pages(self, plan: GroupPlan, layers: range) -> StepPages | None:
        assert plan.rotation is not None
        of, these = self.kernels, slice(layers.start, layers.stop)
        scales = None if of._fp8 is None else of._fp8.scales[these]
        return StepPages(of._pool[:, these], self.tables, plan.rotation, of.scoring.scale, scales)


Build = Callable[[tuple[str, ...]], ctypes.CDLL]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    return library_builder(SOURCE, tmp_path_factory.mktemp("libraries"))


def emulate(build: Build, case: Case) -> Callable[[MegakernelShape, torch.device], dict[int, Launch]]:
    """Makes what choose_megakernels makes, on a CPU of few multiprocessors, for the case's number of rows."""

    def choose(shape: MegakernelShape, device: torch.device) -> dict[int, Launch]:
        assert shape.fits(case.blocks, case.rows)
        assert shape.weights == (shape.dtype if case.weights is None else FP8)
        run = build((*shape.defines(case.blocks, WARPS, case.rows), *case.defines)).run_megakernel
        return {case.rows: lambda arguments: run(ctypes.byref(arguments))}

    return choose


@dataclass(frozen=True)
class Both:
    """A model whose steps the emulated kernel computes, and two caches with the same prompts."""

    model: DenseDecoder
    fixed: TvmCache
    plain: TvmCache
    pools: list[Tensor]

    def assert_same_finite(self) -> None:
        """Padding has stored nothing."""
        assert torch.equal(*(pool.float().isfinite() for pool in self.pools))


@torch.inference_mode()
def both_of(case: Case, build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Both:
    make_model(case.family, vocab_size=200, **case.changes).save_pretrained(tmp_path)
    if case.weights is not None:
        quantize_folder(tmp_path, *SCHEMES[case.weights])
        monkeypatch.setattr(fp8, "multiplies_fp8", lambda *_: True)
        monkeypatch.setattr(fp8, "choose_scaled_linear", lambda weights: partial(naive_product, weights))
    config = load_config(tmp_path, case.dtype)
    monkeypatch.setattr(small_batch_decoder, "choose_megakernels", emulate(build, case))
    model = DenseDecoder(config, load_parameters(tmp_path, config), fused_gemms=TorchFusedGemms())
    group = LayerGroup(tuple(range(config.num_layers)), KV(config.num_kv_heads, config.head_dim))
    scales = case.scales(config.num_layers, config.num_kv_heads)
    layout = KVLayout((group,), case.page_size, config.dtype, scales)
    pools = [torch.full((40, *layout.page_shape(0)), torch.nan).to(layout.stored_dtype) for _ in range(2)]
    caches = []
    for pool in pools:
        cache = TvmCache(
            layout,
            (pool,),
            max_sequences=8,
            max_sequence_length=128,
            rope=config.rope,
            writer=None,
            kernels=OpenKernels,
        )
        for sequence, length in enumerate(case.lengths):
            cache.add_sequence(sequence)
            plan = cache.begin_forward([sequence], [length])
            model.forward(torch.arange(length) + sequence, plan.attention, torch.tensor([0]))
        caches.append(cache)
    fixed, plain = caches
    return Both(model, fixed, plain, pools)


def naive_product(weights: ScaledLinear, x: Tensor) -> Tensor:
    """Multiplies by the dequantized weight, in float32."""
    rows, columns = weights.weight.shape
    scales = weights.scales.repeat_interleave(weights.row_block, 0)[:rows]
    matrix = weights.weight.float() * scales.repeat_interleave(weights.group, 1)[:, :columns]
    bias = None if weights.bias is None else weights.bias.float()
    return F.linear(x.float(), matrix, bias).to(x.dtype)


def assert_near(actual: Tensor, expected: Tensor, case: Case) -> None:
    errors = (actual - expected).norm(dim=1) / expected.norm(dim=1)
    assert errors.max() < case.tolerance


@pytest.mark.gate("norms", "weights of blocks, two rows")
@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_steps_equal_plain_forwards(name: str, build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    both = both_of(case, build, tmp_path, monkeypatch)
    model, fixed, plain = both.model, both.fixed, both.plain
    (batch,) = fixed.graph_buffers([Limits.of_step(case.rows, model.config.num_heads, 1)])
    for step in range(2 * len(case.lengths) // case.active):
        sequences = (np.arange(case.active) + step * case.active) % len(case.lengths)
        tokens = 3 + step + sequences
        plan = plain.begin_forward(sequences.tolist(), [1] * case.active)
        every = torch.arange(case.active)  # not None: a step by nobody but torch
        expected = model.forward(torch.from_numpy(tokens), plan.attention, every)
        fixed.begin(Batch(sequences), batch, [tokens])
        actual = model.forward(batch.inputs[0], batch.attention(), None)[: case.active]
        assert_near(actual, expected, case)
    both.assert_same_finite()


@pytest.mark.gate("8 bits, two rows")
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.rows > 1])
@torch.inference_mode()
def test_verify_steps_equal_plain_forwards(
    name: str, build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are new tokens of one sequence or of several, in any order; some are taken back."""
    case, random = CASES[name], np.random.default_rng(0)
    both = both_of(case, build, tmp_path, monkeypatch)
    model, fixed, plain = both.model, both.fixed, both.plain
    (batch,) = fixed.graph_buffers([Limits.of_verification(case.rows, model.config.num_heads, 1)])
    for step in range(4):
        room, appends = case.rows, {}
        for sequence in random.permutation(len(case.lengths)).tolist():
            if room:
                appends[sequence] = room if step == 0 else int(random.integers(1, room + 1))
                room -= appends[sequence]
        sequences, counts = list(appends), list(appends.values())
        tokens = 3 + step + np.arange(sum(counts))
        plan = plain.begin_forward(sequences, counts)
        taps = range(1, model.config.num_layers)  # none where each step takes the same way
        ids, every = torch.from_numpy(tokens), torch.arange(tokens.size)
        hidden, features = model.tapped(ids, plan.attention, every, taps)
        fixed.begin(Batch(sequences, counts, push=False), batch, [tokens])
        logits, tapped = model.tapped_step(batch.inputs[0], batch.attention(), taps)
        assert_near(logits[: tokens.size], model.logits(hidden), case)
        assert_near(tapped[: tokens.size], features, case)
        both.assert_same_finite()
        for sequence, count in appends.items():
            rejected = int(random.integers(0, count)) if step else count - 1
            fixed.pop(sequence, rejected)
            plain.pop(sequence, rejected)


@pytest.mark.gate("torch.bfloat16")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_weights_in_8_bits_are_widened_exactly(dtype: torch.dtype, build: Build) -> None:
    shape = MegakernelShape(64, 80, 2, 1, 64, 64, dtype, FP8, stored=dtype)
    random = np.random.default_rng(0)
    entries = np.setdiff1d(np.arange(256, dtype=np.uint8), [0x7F, 0xFF])  # all but NaN
    fours = torch.from_numpy(np.concatenate([random.permutation(entries) for _ in range(20)]))
    pairs = torch.empty(fours.numel(), dtype=dtype)
    widen = build(shape.defines(1, WARPS, 1)).widen_fours
    widen(ctypes.c_void_p(fours.data_ptr()), ctypes.c_void_p(pairs.data_ptr()), fours.numel() // 4)
    expected = fours.view(FP8).to(dtype)
    assert torch.equal(pairs.view(torch.int16), expected.view(torch.int16))  # zeros keep their sign


@pytest.mark.parametrize(
    ("rows", "head_dim", "fp8", "expected"),
    [(1, 128, True, (8, 16, 32)), (2, 128, True, (16, 32)), (8, 128, False, (8, 16, 32)), (4, 64, False, (16, 32))],
)
def test_positions_that_are_fetched_at_once_lie_on_a_page(
    rows: int, head_dim: int, fp8: bool, expected: tuple[int, ...]
) -> None:
    stored = FP8 if fp8 else torch.float16
    shape = MegakernelShape(64, 64, 2, 1, head_dim, 64, torch.float16, torch.float16, stored)
    one = torch.zeros(1)
    step = DecodeMegakernel(shape, rows, (), RmsNorm(one, 1e-6), one, launch=lambda _: None)
    tables = DeviceTables(*torch.zeros(4, rows, dtype=torch.int32))

    def takes(page_size: int) -> bool:
        pool = torch.empty(1, 0, 2, 1, page_size, head_dim, dtype=stored)
        return step.takes(StepPages(pool, tables, Rotation(torch.zeros(rows, 2, head_dim)), 1.0, one if fp8 else None))

    assert tuple(filter(takes, (4, 8, 12, 16, 32))) == expected
