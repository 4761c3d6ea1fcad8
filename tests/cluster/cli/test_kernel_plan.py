"""Tests what `tandem build-kernels` would compile, and with how many compilers at once. No compiler for a GPU runs
here."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tandem.cache.kernels.build.nvml import Driver, Gpu
from tandem.cache.kernels.build.side_by_side import Budget, Build, largest_first, read_budget
from tandem.cache.kernels.flashinfer import modules
from tandem.cache.kernels.flashinfer.modules import FA3_BYTES, FlashInferModule, plan_modules
from tandem.cache.kernels.flashinfer.wrappers import _use_built_modules, build_module
from tandem.cache.kinds.kv import KV
from tandem.cache.kinds.latent import Latent
from tandem.cache.kinds.shared import Shared
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.kv_scales import KVScales
from tandem.cache.plan.latent import LatentHeads
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.spans import span_of
from tandem.cluster.cli.kernels import builds, plan
from tandem.cluster.cli.kernels.builds import Running, build_all
from tandem.cluster.cli.kernels.plan import TARGETS, Target, choose_target, plan_kernels
from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.errors import ConfigError, UsageError
from tandem.cluster.processes.process_tree import started_at
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tandem.workers.models.registry import load_config as load_model
from tandem.workers.runner.kernel_plan import plan_cubins
from tandem.workers.weights.formats.format import Quantization
from tests.support.waiting import until

HOPPER, AMPERE = (9, 0), (8, 0)
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    **{"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
    **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960},
    **{"rope_theta": 1000000, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16", "tie_word_embeddings": True},
}
GIB = 1 << 30


@pytest.fixture
def qwen3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a checkpoint's folder, and an empty folder for builds."""
    monkeypatch.setenv("TANDEM_KERNEL_CACHE", str(tmp_path / "kernels"))
    folder = tmp_path / "qwen3"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3_06B))
    (folder / "model.safetensors").touch()
    return folder


def layout_of(*windows: int | None, dtype: torch.dtype = torch.bfloat16, fp8: bool = False) -> KVLayout:
    groups = tuple(LayerGroup((layer,), KV(8, 128, span_of(window))) for layer, window in enumerate(windows))
    return KVLayout(groups, 16, dtype, KVScales.uniform(len(windows)) if fp8 else None)


def titles(
    layout: KVLayout,
    capability: tuple[int, int] = HOPPER,
    softcap: float | None = None,
    heads: LatentHeads | None = None,
) -> list[str]:
    return [module.title for module in plan_modules(layout, softcap, capability, heads)]


class TestModules:
    def test_a_model_of_16_bits_needs_fa2_and_the_best(self) -> None:
        assert titles(layout_of(None)) == ["FlashInfer fa2 bfloat16 128", "FlashInfer fa3 bfloat16 128"]
        assert titles(layout_of(None), AMPERE) == ["FlashInfer fa2 bfloat16 128"]
        assert titles(layout_of(None, dtype=torch.float32)) == []

    def test_each_kind_of_group_has_modules_of_its_own(self) -> None:
        found = titles(layout_of(None, 128, 128, None), softcap=30.0)
        ends = ["128 softcap", "128 softcap", "128 window softcap", "128 window softcap"]
        assert [title.partition("bfloat16 ")[2] for title in found] == ends

    def test_8_bits_are_widened_to_float16(self) -> None:
        assert titles(layout_of(None, fp8=True)) == [
            "FlashInfer fa2 float16 over float8_e4m3fn 128",
            "FlashInfer fa3 bfloat16 128",
        ]

    def test_latents(self) -> None:
        latents = KVLayout((LayerGroup((0,), Latent(576, 512)),), 16, torch.bfloat16)
        absorbed = "FlashInfer fa3 bfloat16 512/64 latent"
        assert titles(latents, heads=LatentHeads(128, 128)) == ["FlashInfer fa3 bfloat16 192/128", absorbed]
        assert titles(latents, heads=LatentHeads(192, 256)) == ["FlashInfer fa3 bfloat16 256", absorbed]
        in_8_bits = replace(latents, scales=KVScales.uniform(1))
        assert titles(in_8_bits, heads=LatentHeads(128, 128)) == ["FlashInfer fa3 bfloat16 192/128"]

    def test_one_plane_of_k_and_v_needs_none(self) -> None:
        assert titles(KVLayout((LayerGroup((0,), Shared(512, span_of(128))),), 16, torch.bfloat16)) == []

    def test_heads_that_flashinfer_has_none_for_need_none(self) -> None:
        groups = (LayerGroup((0,), KV(1, 512)), LayerGroup((1,), KV(1, 256, span_of(24))))
        ends = ["256 window", "256 window"]
        assert [title.partition("bfloat16 ")[2] for title in titles(KVLayout(groups, 16, torch.bfloat16))] == ends

    def test_what_is_built_is_used_unless_flashinfers_own_package_is_there(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            modules, "version", lambda name: {"flashinfer-python": "0.6.18", "torch": "2.13+cu130"}[name]
        )
        monkeypatch.setenv("TANDEM_KERNEL_CACHE", str(tmp_path))
        env = SimpleNamespace(
            FLASHINFER_WORKSPACE_DIR=Path("/home/x/.cache/flashinfer/0.6.18/90a"),
            FLASHINFER_AOT_DIR="its own",
            has_flashinfer_jit_cache=lambda: False,
        )
        _use_built_modules(env)
        assert env.FLASHINFER_AOT_DIR == "its own"
        built = tmp_path / "flashinfer" / "0.6.18-torch2.13+cu130-90a"
        built.mkdir(parents=True)
        assert modules.module_folder(modules.folder_name([modules.arch_name(HOPPER)])) == built
        _use_built_modules(env)
        assert built == env.FLASHINFER_AOT_DIR

    def test_a_library_is_kept_where_flashinfer_looks_for_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The nvcc and the ninja of this test only write a file."""
        asked: list[tuple[object, ...]] = []

        def generate(*options: object) -> SimpleNamespace:
            asked.append(options)
            made = Path(os.environ["FLASHINFER_WORKSPACE_BASE"]) / "made.so"
            return SimpleNamespace(name="uri", jit_library_path=made, build=lambda verbose: made.write_text("library"))

        attention = SimpleNamespace(modules=SimpleNamespace(gen_batch_prefill_module=generate))
        monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", "")
        monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace())
        monkeypatch.setitem(sys.modules, "flashinfer.jit", SimpleNamespace(attention=attention))
        monkeypatch.setitem(sys.modules, "flashinfer.jit.attention", attention)
        module = FlashInferModule("fa3", "bfloat16", "bfloat16", 128, 128, window=True)
        build_module(module, tmp_path / "built")
        dtypes = (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.int32)
        assert asked == [("fa3", *dtypes, 128, 128, 0, True, False, False)]
        assert (tmp_path / "built" / "uri" / "uri.so").read_text() == "library"
        assert module.marker(tmp_path / "built").exists()
        assert not replace(module, window=False).marker(tmp_path / "built").exists()
        assert {path.name for path in (tmp_path / "built").iterdir()} == {"uri", module.marker(tmp_path).name}


class TestCubins:
    def test_a_plain_model_on_hopper(self, qwen3: Path) -> None:
        model = load_model(qwen3)
        found = [title for title, _ in plan_cubins(model, torch.bfloat16, HOPPER, 132)]
        rows = [f"decode megakernel of {rows} rows" for rows in (1, 2, 4, 8)]
        assert found == ["skinny GEMMs, streamed", *rows, "skinny GEMMs, resident"]
        biased = replace(model, qkv_bias=True)
        assert [title for title, _ in plan_cubins(biased, torch.bfloat16, HOPPER, 132)] == found[:-1]

    def test_weights_in_8_bits(self, qwen3: Path) -> None:
        """Resident kernels are left out; and no megakernel multiplies by scales of 64 columns."""
        model = load_model(qwen3)
        for block in (None, (128, 128), (128, 64)):
            quantized = replace(model, quantization=Quantization("fp8", block))
            found = dict(plan_cubins(quantized, torch.bfloat16, HOPPER, 132))
            megakernels = [cubin for title, cubin in found.items() if title.startswith("decode megakernel")]
            assert len(found) == 1 + len(megakernels) == (1 if block == (128, 64) else 5)
            assert all("-DWEIGHT8=1" in cubin.options for cubin in megakernels)

    def test_other_models_and_gpus(self, qwen3: Path) -> None:
        model = load_model(qwen3)
        assert list(plan_cubins(model, torch.bfloat16, AMPERE, 108)) == []
        normed = replace(model, out_norms=True)
        assert [title for title, _ in plan_cubins(normed, torch.bfloat16, HOPPER, 132)] == ["skinny GEMMs, streamed"]


class TestPlan:
    def plan(self, model: Path, name: str = "gpu", target: Target | None = TARGETS["h200"]) -> plan.KernelPlan:
        keys = {"island.device": "cuda", "island.transport": "nvshmem"} if name == "gpu" else {}
        return plan_kernels(load_config(None, {"model.path": str(model), **keys}), target)

    def test_a_gpu_without_a_toolkit_lacks_everything_and_says_why(
        self, qwen3: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(plan.shutil, "which", lambda name: None)
        found = self.plan(qwen3)
        assert "decode megakernel of 1 rows: nvcc is not on the PATH" in found.lacking
        assert all(build.title.startswith("C ") for build in found.missing)

    def test_with_a_toolkit_large_builds_come_first(self, qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(plan.shutil, "which", lambda name: f"/usr/bin/{name}")
        monkeypatch.setattr(plan, "module_folder", lambda arch: Path("/nowhere") / arch)
        found = [build.title for build in self.plan(qwen3).missing]
        assert found[:2] == ["FlashInfer fa3 bfloat16 128", "FlashInfer fa2 bfloat16 128"]
        assert {"decode megakernel of 8 rows", "C page_tables.c", "C page_counts.c"} <= set(found)
        assert "C native_layer.c" not in found

    def test_a_cpu_needs_c_alone(self, qwen3: Path) -> None:
        found = self.plan(qwen3, "cpu", None)
        assert not found.lacking
        assert "C native_layer.c" in [build.title for build in found.missing]

    def test_a_checkpoint_that_cannot_be_served(self, qwen3: Path) -> None:
        (qwen3 / "config.json").write_text('{"architectures": ["LamaForCausalLM"]}')
        with pytest.raises(ConfigError, match=r"^model\.path: .*LlamaForCausalLM"):
            self.plan(qwen3)

    def test_what_pages_cannot_hold_is_named_by_its_key(self, tmp_path: Path) -> None:
        make_checkpoint(tmp_path, arch="deepseek_v4")
        config = load_config(None, {"model.path": str(tmp_path), "cache.kv_cache_dtype": "fp8_e4m3"})
        with pytest.raises(ConfigError, match=r"^cache\.kv_cache_dtype is 'fp8_e4m3'"):
            plan_kernels(config, None)

    def test_the_gpu_is_named_or_this_hosts(self) -> None:
        assert choose_target("H200", Driver()) == TARGETS["h200"]
        with pytest.raises(UsageError, match=r"--gpu is 'h300'; it must be one of a100, "):
            choose_target("h300", Driver())
        with pytest.raises(UsageError, match="this host has no GPU; say for which one with --gpu"):
            choose_target(None, Driver())
        one = Gpu("H20", 96 * GIB, HOPPER, 78)
        assert choose_target(None, Driver("580.1", (one, one))) == Target("H20", HOPPER, 78)


class TestSideBySide:
    FA3 = Build("fa3", "{}", 10, FA3_BYTES)
    CUBIN = Build("cubin", "{}", 1, 2 * GIB)

    def test_a_module_gets_as_many_compilers_as_memory_and_cores_allow(self) -> None:
        assert Budget(128 * GIB, 16).jobs(self.FA3) == 10
        assert Budget(20 * GIB, 16).jobs(self.FA3) == 3
        assert Budget(128 * GIB, 4).jobs(self.FA3) == 4
        assert Budget(1 * GIB, 4).jobs(self.FA3) == 1  # alone it may do

    def test_four_fa3_modules_do_not_run_at_once_in_128_gib(self) -> None:
        waiting = [self.FA3] * 4
        assert len(Budget(100 * GIB, 64).fitting(waiting, [])) == 1
        assert len(Budget(130 * GIB, 64).fitting(waiting, [])) == 2
        assert len(Budget(130 * GIB, 64).fitting(waiting, [self.FA3])) == 1
        assert len(Budget(130 * GIB, 64).fitting(waiting, [self.FA3, self.FA3])) == 0

    def test_small_builds_fill_what_large_ones_leave_and_overtake_none(self) -> None:
        budget = Budget(66 * GIB, 64)
        assert budget.fitting([self.FA3, self.CUBIN, self.CUBIN, self.CUBIN, self.CUBIN], []) == [
            self.FA3,
            *[self.CUBIN] * 3,
        ]
        assert budget.fitting([self.FA3, self.CUBIN], [self.CUBIN] * 4) == []
        assert largest_first([self.CUBIN, self.FA3, self.CUBIN])[0] == self.FA3

    def test_the_budget_is_within_the_machine(self) -> None:
        budget = read_budget()
        assert 0 < budget.memory < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        assert 1 <= budget.cores <= (os.cpu_count() or 1)


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Lists builds, which are Python scripts here; each that starts is noted with its compilers."""
    started: list[tuple[str, int]] = []
    before = builds.start

    def start(build: Build, jobs: int) -> Running:
        started.append((build.title, jobs))
        command = ["-c", build.order]
        monkeypatch.setattr(
            builds.subprocess, "Popen", lambda _, **options: popen([sys.executable, *command], **options)
        )
        return before(build, jobs)

    popen = subprocess.Popen
    monkeypatch.setattr(builds, "start", start)
    return started


class TestBuilding:
    def test_all_are_built_and_failures_are_told(self, scripts: list[tuple[str, int]]) -> None:
        orders = {
            "good": "import os; assert os.environ['MAX_JOBS'] == '2'",
            "bad": "import sys; print('nvcc: no such thing', file=sys.stderr); sys.exit(1)",
            "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        }
        said: list[str] = []
        waiting = [Build(title, order, 2, GIB) for title, order in orders.items()]
        failed = build_all(waiting, Budget(4 * GIB, 4), said.append, builds.start)
        assert sorted(failed) == [
            "bad: nvcc: no such thing",
            "killed: ended by signal 9, which the kernel sends when memory runs out",
        ]
        assert sorted(scripts) == [("bad", 2), ("good", 2), ("killed", 2)]
        assert any(line.startswith("building good (1 of 3), ") for line in said)
        assert any(line.startswith("built good in ") for line in said)

    @pytest.mark.usefixtures("scripts")
    def test_a_build_that_fails_leaves_no_compiler_behind(self, tmp_path: Path) -> None:
        pid = tmp_path / "pid"
        order = (
            "import subprocess, sys; child = subprocess.Popen(['sleep', '600'], stderr=subprocess.DEVNULL);"
            f"open({str(pid)!r}, 'w').write(str(child.pid)); sys.exit('took too long')"
        )
        assert build_all([Build("bad", order)], Budget(GIB, 1), print, builds.start) == ["bad: took too long"]
        until(lambda: not started_at(int(pid.read_text())))

    @pytest.mark.usefixtures("scripts")
    def test_a_signal_ends_compilers_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        running: list[Running] = []

        def start(build: Build, jobs: int) -> Running:
            running.append(builds.start(build, jobs))
            return running[-1]

        def interrupt(line: str) -> None:
            if line.startswith("still "):
                raise KeyboardInterrupt

        waiting = [Build("long", "import subprocess; subprocess.run(['sleep', '60'])")]
        monkeypatch.setattr(builds, "LINE_SECONDS", 0.2)
        with pytest.raises(KeyboardInterrupt):
            build_all(waiting, Budget(GIB, 1), interrupt, start)
        assert running[0].process.returncode == -9
