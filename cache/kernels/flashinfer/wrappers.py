"""FlashInfer and its wrappers. The only importer of flashinfer."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def load_flashinfer() -> Any:
    """The library, which takes seconds to import."""
    import flashinfer  # pyright: ignore[reportMissingImports]  # comes with the extras cuda12 and cuda13

    return flashinfer


def prefill_in_graph(workspace: Tensor, plan_workspace: Tensor, arrays: Sequence[Tensor], backend: str) -> Any:
    """A prefill wrapper for a CUDA graph. It reads `arrays` where they stand: qo_indptr, kv_indptr, kv_indices and
    kv_last_page_len, int32. plan_workspace: of FlashInfer's planning."""
    names = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
    wrapper = load_flashinfer().BatchPrefillWithPagedKVCacheWrapper(
        workspace, "HND", use_cuda_graph=True, backend=backend, **dict(zip(names, arrays, strict=True))
    )
    wrapper.reset_workspace_buffer(workspace, plan_workspace)
    return wrapper
