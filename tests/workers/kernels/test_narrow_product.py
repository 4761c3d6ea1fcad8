"""narrow_product.cu on this machine's CPU (see emulated/device.h), through the decoder, against any rows' decoder."""

import ctypes
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.workers.kernels.skinny_gemm import narrow_product
from tandem.workers.kernels.skinny_gemm.narrow_product import (
    SHARED_BYTES,
    WARPS,
    Arguments,
    NarrowKernels,
    NarrowShape,
)
from tandem.workers.kernels.torch.layer import TorchLayerKernels
from tandem.workers.kernels.torch.row import TorchRowKernels
from tandem.workers.models import row_decoder
from tandem.workers.models.decoder import DenseDecoder
from tandem.workers.models.registry import load_config
from tandem.workers.models.weights import load_parameters
from tests.support.checkpoints import make_model
from tests.workers.reference_attention import ReferenceAttention, Sequence

COMPILER = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
EMULATED = Path(__file__).parent / "emulated"
H200 = 132  # multiprocessors
QWEN3 = NarrowShape(hidden=1024, inner=3072, heads=2048, qkv=4096, dtype=torch.bfloat16)


class EmulatedFunction:
    """In place of cuda_driver's Function; launched: gets the names of those that are."""

    def __init__(self, launched: list[str], run: Any, name: str, threads: int, shared_bytes: int, cluster: int) -> None:
        assert threads == 32 * WARPS
        self._launched, self._run, self._name, self._sizes = launched, run, name, (shared_bytes, cluster)

    def launch(self, blocks: int, arguments: tuple[Arguments]) -> None:
        assert self._run(self._name.encode(), blocks, *self._sizes, ctypes.byref(arguments[0])) == 0
        self._launched.append(self._name)


def emulate(
    folder: Path, multiprocessors: int, monkeypatch: pytest.MonkeyPatch, launched: list[str]
) -> Callable[[NarrowShape, torch.device], NarrowKernels]:
    """What choose_narrow_kernels gives, on a CPU of few multiprocessors."""

    def choose(shape: NarrowShape, device: torch.device) -> NarrowKernels:
        defines = shape.defines(multiprocessors)
        assert defines is not None
        library = folder / "narrow_product.so"
        header = f'-DEMULATED_DEVICE="{EMULATED / "device.h"}"'
        command = [str(COMPILER), "-std=c++17", "-O1", "-w", "-shared", "-fPIC", *defines, header]
        subprocess.run([*command, str(EMULATED / "narrow_product.cpp"), "-o", str(library)], check=True, timeout=120)
        run = ctypes.CDLL(str(library)).run_narrow_product
        monkeypatch.setattr(narrow_product, "Module", lambda _: run)
        monkeypatch.setattr(narrow_product, "Function", partial(EmulatedFunction, launched))
        return NarrowKernels(b"", shape, multiprocessors, TorchLayerKernels())

    return choose


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
    monkeypatch.setattr(row_decoder, "choose_narrow_kernels", choose)
    few = DenseDecoder(config, load_parameters(tmp_path, config), row_kernels=TorchRowKernels())
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
    for one in QWEN3.products:
        octets = one.octets(H200)
        assert octets is not None
        assert one.rows // (8 * octets) * one.splits == 128
        assert one.shared_bytes(octets, 2) <= SHARED_BYTES
    assert QWEN3.defines(H200) is not None


@pytest.mark.parametrize(
    "other",
    [
        NarrowShape(4096, 12288, 4096, 6144, torch.bfloat16),  # weights too wide to be kept
        NarrowShape(1024, 3072, 2048, 4096, torch.float32),
        NarrowShape(1000, 3072, 2048, 4096, torch.float16),
        NarrowShape(512, 1536, 1024, 2048, torch.float16),  # too few outputs for a block each
    ],
    ids=str,
)
def test_what_does_not_fit(other: NarrowShape) -> None:
    assert other.defines(H200) is None
