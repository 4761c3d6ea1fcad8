"""The kernels of native.c against torch's and against attention token by token, and how they are built."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tandem.cache.kernels.backend import AppendThenAttend
from tandem.cache.kernels.build.native_build import build_library, load_library
from tandem.cache.kernels.choice import choose_kernels
from tandem.cache.kernels.native.crew import load_crew
from tandem.cache.kernels.native.kernels import SOURCE, NativeKernels
from tandem.cache.kernels.scoring import Scoring
from tandem.cache.kernels.torch.kernels import TorchKernels
from tandem.cache.plan.rope import RopeParameters, RotaryEmbedding, Rotation
from tandem.cache.plan.tables import PageTables, TokenLayout, lay_out_tokens, look_up_pages
from tests.cache.naive import attend
from tests.support.tolerances import assert_close

LAYERS, LAYER = 3, 1
HEAD_DIMS = (8, 16, 32, 40, 64, 80, 96, 128, 256)


@pytest.fixture(autouse=True)
def restored_threads() -> Iterator[None]:
    yield
    set_threads(1)


def set_threads(threads: int) -> None:
    crew = load_crew()
    assert crew is not None, "the tests need a C compiler"
    crew.threads = threads


def native(pool: Tensor) -> NativeKernels:
    kernels = choose_kernels(pool, Scoring(pool.shape[-1] ** -0.5))
    assert isinstance(kernels, NativeKernels), "the tests need a C compiler"
    return kernels


@dataclass
class Case:
    """A pool with what some sequences have cached, and the new tokens of one forward."""

    pool: Tensor
    tokens: TokenLayout
    tables: PageTables
    q: Tensor
    k: Tensor
    v: Tensor
    rotation: Rotation | None

    def slots(self, sequence: int) -> Tensor:
        """int64: the slots of all positions of a sequence."""
        begin, end = self.tables.kv_indptr[sequence : sequence + 2]
        pages = torch.from_numpy(self.tables.kv_indices[begin:end]).long()
        size = self.pool.shape[4]
        slots = pages[:, None] * size + torch.arange(size)
        return slots.reshape(-1)[: int(self.tokens.seq_lens[sequence])]

    def run(self, kernels: AppendThenAttend) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q and k, and o."""
        with torch.inference_mode():
            plan = kernels.plan(self.tokens, self.tables)
            q, k = kernels.append(LAYER, self.q, self.k, self.v, self.rotation, plan)
            return q, k, kernels.attend(LAYER, q, k, self.v, plan)


def case_of(
    lengths: list[int],
    appends: list[int],
    *,
    kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 32,
    page_size: int = 16,
    rotary_dim: int | None = None,
    seed: int = 0,
) -> Case:
    """lengths: before the append. What no sequence has written is NaN. rotary_dim None: without rotation."""
    generator = torch.Generator().manual_seed(seed)
    tokens = lay_out_tokens(np.array(lengths), np.array(appends))
    counts = -(-tokens.seq_lens // page_size)
    widest = int(counts.max())
    order = torch.randperm(len(lengths) * widest, generator=generator).int().numpy()
    rows = np.arange(len(lengths))
    tables = look_up_pages(order.reshape(len(lengths), widest), rows, tokens, page_size)
    pool = torch.full((order.size, LAYERS, 2, kv_heads, page_size, head_dim), torch.nan)
    # One projection's output, as the models cut it: rows of q, k and v have one stride.
    heads = group * kv_heads
    qkv = torch.randn(int(tokens.qo_indptr[-1]), heads + 2 * kv_heads, head_dim, generator=generator)
    q, k, v = qkv.split_with_sizes((heads, kv_heads, kv_heads), 1)
    rotation = None
    if rotary_dim is not None:
        table = RotaryEmbedding(RopeParameters("default", rotary_dim, theta=500.0), 2048, "cpu", torch.float32)
        rotation = table.rotation(torch.from_numpy(tokens.positions).long())
    case = Case(pool, tokens, tables, q, k, v, rotation)
    for sequence, length in enumerate(lengths):
        slots = case.slots(sequence)[:length]
        cached = torch.randn(length, 2, kv_heads, head_dim, generator=generator)
        pool[slots // page_size, LAYER, :, :, slots % page_size] = cached
    return case


def check(case: Case) -> None:
    """Pools that were alike stay alike, and native output is the naive one."""
    heads, size = case.pool.shape[3], case.pool.shape[4]
    reference = case.pool.clone()
    given = [x.clone() for x in (case.q, case.k, case.v)]
    q, k, o = case.run(native(case.pool))
    rotated = (case.q, case.k) if case.rotation is None else case.rotation.apply_both(case.q, case.k)
    assert all(torch.equal(x, before) for x, before in zip((case.q, case.k, case.v), given, strict=True))
    for actual, expected in zip((q, k), rotated, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
        assert case.rotation is not None or torch.equal(actual, expected)
    slots = torch.from_numpy(case.tables.slot_mapping).long()
    reference[slots // size, LAYER, 0, :, slots % size] = k  # bit for bit what append returned, as peers get it
    reference[slots // size, LAYER, 1, :, slots % size] = case.v
    torch.testing.assert_close(case.pool, reference, rtol=0, atol=0, equal_nan=True)
    indptr = case.tokens.qo_indptr
    for sequence in range(len(indptr) - 1):
        own = case.slots(sequence)
        keys, values = case.pool[own // size, LAYER, :, :, own % size].double().unbind(1)
        expected = attend(q[indptr[sequence] : indptr[sequence + 1]].double(), keys, values)
        assert_close(o[indptr[sequence] : indptr[sequence + 1]], expected)
    assert o.shape == case.q.shape
    assert q.shape[1] % heads == 0


@settings(max_examples=60)
@given(data=st.data())
def test_decodes_of_any_shape(data: st.DataObject) -> None:
    head_dim = data.draw(st.sampled_from(HEAD_DIMS), "head_dim")
    rotary_dims = [None, head_dim, head_dim // 2]
    lengths = data.draw(st.lists(st.integers(0, 400), min_size=1, max_size=5), "lengths")
    set_threads(data.draw(st.integers(1, 3), "threads"))
    check(
        case_of(
            lengths,
            [1] * len(lengths),
            kv_heads=data.draw(st.sampled_from([1, 2, 4]), "kv_heads"),
            group=data.draw(st.sampled_from([1, 2, 3, 8, 11]), "group"),
            head_dim=head_dim,
            page_size=data.draw(st.sampled_from([1, 5, 8, 16, 64, 300]), "page_size"),
            rotary_dim=data.draw(st.sampled_from(rotary_dims), "rotary_dim"),
            seed=data.draw(st.integers(0, 1000), "seed"),
        )
    )


@settings(max_examples=25)
@given(
    sequences=st.lists(st.tuples(st.integers(0, 40), st.sampled_from([1, 1, 2, 7, 30])), min_size=1, max_size=6),
    threads=st.integers(1, 2),
)
def test_prompts_chunks_and_decodes_in_one_forward(sequences: list[tuple[int, int]], threads: int) -> None:
    set_threads(threads)
    lengths, appends = zip(*sequences, strict=True)
    check(case_of(list(lengths), list(appends), rotary_dim=32))


@pytest.mark.parametrize("threads", [1, 2])
def test_many_tokens_are_appended_alike_by_any_number_of_threads(threads: int) -> None:
    set_threads(threads)
    check(case_of([0, 3], [150, 150], head_dim=64, rotary_dim=64))


def test_any_number_of_threads_gives_the_same_bits() -> None:
    outputs = []
    for threads in (1, 2, 3):
        set_threads(threads)
        case = case_of([900, 1200, 3, 800], [1, 1, 1, 1], rotary_dim=32)
        outputs.append(case.run(native(case.pool))[2])
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    check(case_of([900, 1200, 3, 800], [1, 1, 1, 1], rotary_dim=32))


@pytest.mark.parametrize("scale", [1e-3, 30.0])
def test_scores_far_apart(scale: float) -> None:
    """Weights that underflow, and largest scores that come late and in another chunk than the first."""
    case = case_of([700, 300, 1], [1, 1, 1])
    for sequence in range(3):
        slots = case.slots(sequence)[:-1]
        rising = torch.linspace(-scale, scale, slots.numel())[:, None, None]
        case.pool[slots // 16, LAYER, 0, :, slots % 16] *= rising
    check(case)


def test_a_sequence_that_is_not_finite_stays_alone() -> None:
    case = case_of([40, 40, 40], [1, 1, 1])
    slots = case.slots(1)[:-1]
    case.pool[slots // 16, LAYER, 0, :, slots % 16] = torch.inf
    case.pool[slots // 16, LAYER, 1, :, slots % 16] = torch.nan
    _, _, o = case.run(native(case.pool))
    assert torch.isfinite(o[[0, 2]]).all()
    assert o[1].isnan().all()


def test_tensors_of_any_stride() -> None:
    plain = case_of([20, 9], [1, 1], rotary_dim=16)
    strided = case_of([20, 9], [1, 1], rotary_dim=16)
    for name in "qkv":
        x = getattr(strided, name)
        setattr(strided, name, x.transpose(0, 2).contiguous().transpose(0, 2))
    for actual, expected in zip(strided.run(native(strided.pool)), plain.run(native(plain.pool)), strict=True):
        assert torch.equal(actual, expected)
    torch.testing.assert_close(strided.pool, plain.pool, rtol=0, atol=0, equal_nan=True)


def test_each_layer_has_its_own_pages() -> None:
    case = case_of([5], [1])
    case.run(native(case.pool))
    others = [layer for layer in range(LAYERS) if layer != LAYER]
    assert case.pool[:, others].isnan().all()


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.bfloat16, 32), (torch.float32, 20), (torch.float32, 264)])
def test_torch_serves_what_native_code_does_not(dtype: torch.dtype, head_dim: int) -> None:
    pool = torch.zeros(2, LAYERS, 2, 1, 4, head_dim, dtype=dtype)
    assert isinstance(choose_kernels(pool, Scoring(1.0)), TorchKernels)


# Building


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache folder, and nothing loaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for loaded in (load_library, load_crew):
        loaded.cache_clear()
    yield tmp_path
    for loaded in (load_library, load_crew):
        loaded.cache_clear()


def fake_compiler(folder: Path, script: str) -> str:
    """A PATH on which cc is `script` and nothing else is a compiler."""
    compiler = folder / "bin" / "cc"
    compiler.parent.mkdir()
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    return str(compiler.parent)


def assert_torch_serves(caplog: pytest.LogCaptureFixture, reason: str) -> None:
    case = case_of([4, 5], [1, 1], rotary_dim=32)
    case.pool.nan_to_num_()
    with caplog.at_level(logging.WARNING):
        chosen = [choose_kernels(case.pool, Scoring(1.0)) for _ in range(2)]
    assert all(isinstance(kernels, TorchKernels) for kernels in chosen)
    assert [reason in record.getMessage() for record in caplog.records] == [True]
    assert not list(Path(os.environ["XDG_CACHE_HOME"]).rglob("*.so"))
    assert torch.isfinite(case.run(chosen[0])[2]).all()


@pytest.mark.usefixtures("fresh")
def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("PATH", "")
    assert_torch_serves(caplog, "cc or gcc or clang is not on the PATH")


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo it is broken >&2; exit 1", "it is broken"),
        ('for word; do out=$before; before=$word; [ "$out" = -o ] && echo junk > "$word"; done; :', "native-"),
    ],
    ids=["it fails", "it makes what cannot be loaded"],
)
def test_a_broken_compiler(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, script: str, reason: str
) -> None:
    monkeypatch.setenv("PATH", fake_compiler(fresh, script))
    assert_torch_serves(caplog, reason)


def test_a_folder_that_cannot_be_written(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (fresh / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(fresh / "file"))
    assert_torch_serves(caplog, "Not a directory")


@pytest.mark.long
def test_processes_that_build_at_once(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys; from tandem.cache.kernels.build.native_build import build_library;"
        "build_library(*map(pathlib.Path, sys.argv[1:])).append"
    )
    command = [sys.executable, "-c", code, str(SOURCE), str(tmp_path / "new")]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    errors = [process.communicate(timeout=100)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    assert [path.suffix for path in (tmp_path / "new").iterdir()] == [".so"]


def test_the_library_is_built_once(tmp_path: Path) -> None:
    build_library(SOURCE, tmp_path)
    made = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    build_library(SOURCE, tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == made
