"""FlashInfer and its wrappers. The only importer of flashinfer."""

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.cache.kernels.flashinfer.modules import FlashInferModule, module_folder
from tandem.cache.kernels.flashinfer.served_version import refused_version


def load_flashinfer() -> Any:
    """The library, which takes seconds to import. It finds the modules that were built ahead.

    RuntimeError for a version that does not serve.
    """
    if reason := refused_version():
        raise RuntimeError(reason)
    import flashinfer  # pyright: ignore[reportMissingImports]  # comes with the extras cuda12 and cuda13
    from flashinfer.jit import env  # pyright: ignore[reportMissingImports]

    _use_built_modules(env)
    return flashinfer


def _use_built_modules(env: Any) -> None:
    """env: flashinfer.jit.env. Modules of the package flashinfer-jit-cache, where it is installed, come first."""
    built = module_folder(env.FLASHINFER_WORKSPACE_DIR.name)
    if built.is_dir() and not env.has_flashinfer_jit_cache():
        env.FLASHINFER_AOT_DIR = built


def build_module(module: FlashInferModule, folder: Path) -> None:
    """Compiles the module with nvcc and ninja, and keeps its library in `folder`.

    The process has not imported FlashInfer before. FLASHINFER_CUDA_ARCH_LIST names the architecture, MAX_JOBS the
    number of compilers. RuntimeError with what the compiler said.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        os.environ["FLASHINFER_WORKSPACE_BASE"] = work
        from flashinfer.jit.attention import modules  # pyright: ignore[reportMissingImports]

        spec = _spec(modules, module)
        spec.build(verbose=False)
        library = folder / spec.name / f"{spec.name}.so"
        library.parent.mkdir(exist_ok=True)
        made = library.with_suffix(f".{os.getpid()}")
        shutil.copyfile(spec.jit_library_path, made)
        made.replace(library)
    module.marker(folder).write_text(f"{spec.name}\n", encoding="utf-8")


def _spec(modules: Any, module: FlashInferModule) -> Any:
    q, kv = getattr(torch, module.q), getattr(torch, module.kv)
    dtypes, sizes = (q, kv, q, torch.int32), (module.head_qk, module.head_vo)
    if module.latent:
        return modules.gen_batch_mla_module(module.backend, *dtypes, *sizes, False)
    no_position_encoding, no_fp16_reduction = 0, False
    options = (no_position_encoding, module.window, module.softcap, no_fp16_reduction)
    return modules.gen_batch_prefill_module(module.backend, *dtypes, *sizes, *options)


def prefill_in_graph(workspace: Tensor, plan_workspace: Tensor, arrays: Sequence[Tensor], backend: str) -> Any:
    """A prefill wrapper for a CUDA graph. It reads `arrays` where they stand: qo_indptr, kv_indptr, kv_indices and
    kv_last_page_len, int32. plan_workspace: of FlashInfer's planning."""
    names = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
    wrapper = load_flashinfer().BatchPrefillWithPagedKVCacheWrapper(
        workspace, "HND", use_cuda_graph=True, backend=backend, **dict(zip(names, arrays, strict=True))
    )
    wrapper.reset_workspace_buffer(workspace, plan_workspace)
    return wrapper
