"""resident.cu on this machine's CPU (see emulated/device.h), through the decoder, against any rows' decoder."""

import ctypes
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.workers.kernels.skinny_gemm import resident
from tandem.workers.kernels.skinny_gemm.resident import (
    SHARED_BYTES,
    WARPS,
    ResidentArguments,
    ResidentGemms,
    ResidentShape,
)
from tandem.workers.kernels.torch.layer import TorchLayerKernels
from tandem.workers.models import small_batch_decoder
from tandem.workers.models.decoder import DenseDecoder
from tandem.workers.models.registry import load_config
from tandem.workers.models.weights import load_parameters
from tests.support.checkpoints import make_model
from tests.support.fused_gemms import TorchFusedGemms
from tests.workers.kernels.emulated.library import COMPILER, library_builder
from tests.workers.reference_attention import ReferenceAttention, Sequence

SOURCE = Path(__file__).parent / "emulated" / "resident.cpp"
H200 = 132  # multiprocessors
QWEN3 = ResidentShape(hidden=1024, intermediate=3072, heads=2048, qkv=4096, dtype=torch.bfloat16)


class EmulatedFunction:
    """Stands in for driver.py's Function. launched: gets the names of launched functions."""

    def __init__(
        self, launched: list[str], run: Any, name: str, *, threads: int, shared_bytes: int, cluster: int
    ) -> None:
        assert threads == 32 * WARPS
        self._launched, self._run, self._name, self._sizes = launched, run, name, (shared_bytes, cluster)

    def launch(self, blocks: int, arguments: tuple[ResidentArguments]) -> None:
        assert self._run(self._name.encode(), blocks, *self._sizes, ctypes.byref(arguments[0])) == 0
        self._launched.append(self._name)


def emulate(
    folder: Path, multiprocessors: int, monkeypatch: pytest.MonkeyPatch, launched: list[str]
) -> Callable[[ResidentShape, torch.device], ResidentGemms]:
    """Makes what choose_resident_gemms makes, on a CPU of few multiprocessors."""

    def choose(shape: ResidentShape, device: torch.device) -> ResidentGemms:
        defines = shape.defines(multiprocessors)
        assert defines is not None
        run = library_builder(SOURCE, folder)(tuple(defines)).run_resident_gemm
        monkeypatch.setattr(resident, "Module", lambda _: run)
        monkeypatch.setattr(resident, "Function", partial(EmulatedFunction, launched))
        return ResidentGemms(b"", shape, multiprocessors, TorchLayerKernels())

    return choose


@pytest.mark.gate("*-changes0")
@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("family", "dtype", "rows", "multiprocessors", "changes"),
    [
        ("qwen3", "bfloat16", 13, 16, {"hidden_size": 160, "head_dim": 64, "intermediate_size": 384}),
        ("qwen3", "float16", 30, 32, {"hidden_size": 288, "head_dim": 64, "intermediate_size": 384}),
        # More columns of down than are under way at once.
        (
            "llama",
            "float16",
            18,
            80,
            {"num_hidden_layers": 1, "hidden_size": 320, "head_dim": 64, "intermediate_size": 4480},
        ),
        # qkv and down are of one shape.
        ("qwen3", "bfloat16", 9, 32, {"hidden_size": 512, "head_dim": 64, "intermediate_size": 512}),
    ],
)
@torch.inference_mode()
def test_logits_equal_those_of_the_whole_decoder(
    family: str,
    dtype: str,
    rows: int,
    multiprocessors: int,
    changes: dict[str, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_model(family, **changes).save_pretrained(tmp_path)
    config = load_config(tmp_path, dtype)
    launched: list[str] = []
    choose = emulate(tmp_path, multiprocessors, monkeypatch, launched)
    monkeypatch.setattr(small_batch_decoder, "choose_resident_gemms", choose)
    few = DenseDecoder(config, load_parameters(tmp_path, config), fused_gemms=TorchFusedGemms())
    whole = DenseDecoder(config, load_parameters(tmp_path, config))
    logits = []
    for decoder in (few, whole):
        attention, sequences = ReferenceAttention(config), [Sequence(2) for _ in range(rows)]
        for tokens in (torch.arange(rows) + 3, torch.arange(rows) * 2):
            attention.batch = [(sequence, 1) for sequence in sequences]
            logits.append(decoder.forward(tokens, attention, None))
    kernels = (f"{name}_{-(-rows // 16)}" for name in ("qkv", "o", "gate_up", "down"))
    assert Counter(launched) == dict.fromkeys(kernels, 2 * config.num_layers)
    for actual, expected in zip(logits[:2], logits[2:], strict=True):
        errors = (actual - expected).float().norm(dim=1) / expected.float().norm(dim=1)
        assert errors.max() < (0.02 if dtype == "bfloat16" else 0.003)


def test_every_multiprocessor_has_a_part_of_each_product() -> None:
    for one in QWEN3.gemms:
        octets = one.octets(H200)
        assert octets is not None
        assert one.rows // (8 * octets) * one.splits == 128
        assert one.shared_bytes(octets, 2) <= SHARED_BYTES
    assert QWEN3.defines(H200) is not None


@pytest.mark.parametrize(
    "other",
    [
        ResidentShape(4096, 12288, 4096, 6144, torch.bfloat16),  # weights too wide to be kept
        ResidentShape(1024, 3072, 2048, 4096, torch.float32),
        ResidentShape(1000, 3072, 2048, 4096, torch.float16),
        ResidentShape(512, 1536, 1024, 2048, torch.float16),  # too few outputs for a block each
    ],
    ids=str,
)
def test_what_does_not_fit(other: ResidentShape) -> None:
    assert other.defines(H200) is None
