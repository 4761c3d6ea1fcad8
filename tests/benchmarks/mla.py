"""Latent attention in DeepSeek-V3's shapes through the cache, against FlashInfer's bare wrappers; prints JSON.

decode: a batch of single tokens. attention: the bare MLA wrapper on a pool of one layer ÷ the same on a layer of the
cache's pool. layer: the bare wrapper between the two maps that absorb K's and V's ÷ latent_attention, which also
rotates and appends. prefill: one prompt; the bare ragged wrapper on K and V that are there ÷ latent_attention, which
also gathers and expands them. All times are of CUDA graphs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tandem.cache.kernels.flashinfer.latent import FlashInferLatentKernels
from tandem.cache.paged_cache import PagedKVCache
from tandem.cache.plan.latent import LatentHeads, UpProjections
from tandem.cache.plan.layout import KVLayout, LayerGroup
from tandem.cache.plan.rope import RopeParameters
from tests.benchmarks.results import at_least, print_result, print_skipped, rounded

NUM_HEADS, RANK, ROTATED, PAGE_SIZE, LAYERS, LAYER = 128, 512, 64, 16, 4, 1
HEADS = LatentHeads(key_dim=128, value_dim=128)
SCALE = (HEADS.key_dim + ROTATED) ** -0.5
DTYPE = torch.bfloat16
BATCH, CONTEXT, PROMPT = 64, 4096, 8192
WORKSPACE_BYTES = 256 << 20


def seconds(run: Callable[[], object]) -> float:
    """Median on the device, of calls in a CUDA graph."""
    from triton.testing import do_bench_cudagraph

    milliseconds: Any = do_bench_cudagraph(run, rep=200, return_mode="median")
    return milliseconds / 1e3


class Case:
    """Sequences that hold `cached` positions each and append `new` ones each."""

    def __init__(self, sequences: int, cached: int, new: int) -> None:
        group = LayerGroup(tuple(range(LAYERS)), 1, RANK + ROTATED, latent_rank=RANK)
        layout = KVLayout((group,), PAGE_SIZE, DTYPE)
        num_pages = sequences * -(-(cached + new) // PAGE_SIZE)
        self.pool = torch.randn((num_pages, *layout.page_shape(0)), dtype=DTYPE, device="cuda")
        self.cache = PagedKVCache(
            layout,
            (self.pool,),
            max_sequences=sequences,
            max_sequence_length=cached + new,
            rope=RopeParameters("default", ROTATED),
            writer=None,
            latent=HEADS,
        )
        ids = list(range(sequences))
        for sequence in ids:
            self.cache.add_sequence(sequence)
        for length in (cached, new) if cached else (new,):  # what is cached is the pool's noise
            self.plan = self.cache.begin_forward(ids, [length] * sequences)
        tokens = sequences * new
        self.q = torch.randn(tokens, NUM_HEADS, HEADS.key_dim + ROTATED, dtype=DTYPE, device="cuda")
        self.latents, self.keys = torch.randn(tokens, RANK + ROTATED, dtype=DTYPE, device="cuda").split(
            (RANK, ROTATED), 1
        )
        weight = torch.randn(NUM_HEADS, HEADS.key_dim + HEADS.value_dim, RANK, dtype=DTYPE, device="cuda")
        self.up = UpProjections(weight * RANK**-0.5, HEADS)

    def layer(self) -> Tensor:
        return self.cache.latent_attention(self.plan, LAYER, self.q, self.latents, self.keys, self.up)

    def absorbed(self) -> tuple[Tensor, Tensor]:
        still, rotated = self.q.split_with_sizes((HEADS.key_dim, ROTATED), 2)
        return self.up.absorb(still), rotated


def measure_decode() -> dict[str, float]:
    import flashinfer  # pyright: ignore[reportMissingImports]  # comes with the extras cuda12 and cuda13

    case = Case(BATCH, CONTEXT - 1, 1)
    tables = case.plan.groups[0].tables
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(
        torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    )
    wrapper.plan(
        torch.arange(BATCH + 1, dtype=torch.int32),
        *(torch.from_numpy(array) for array in (tables.kv_indptr, tables.kv_indices, tables.kv_lens)),
        *(NUM_HEADS, RANK, ROTATED, PAGE_SIZE, False, SCALE, DTYPE, DTYPE),
    )
    actual = case.layer()  # plans the cache's own wrapper
    latents, keys = (part.contiguous() for part in case.pool[:, LAYER, 0, 0].split((RANK, ROTATED), 2))
    wide, rotated = case.absorbed()
    kernels = case.cache._groups[0].backend
    assert isinstance(kernels, FlashInferLatentKernels)
    bare = seconds(lambda: wrapper.run(wide, rotated, latents, keys))
    own = seconds(lambda: kernels._absorbed.run(wide, rotated, *kernels._layers[LAYER]))

    def bare_layer() -> Tensor:
        return case.up.values(wrapper.run(*case.absorbed(), latents, keys))

    difference = float((actual.float() - bare_layer().float()).abs().max())
    bare_layer_seconds, layer = seconds(bare_layer), seconds(case.layer)
    return {
        "attention_us": rounded(own * 1e6),
        "attention_to_bare": rounded(bare / own),
        "latents_gb_per_s": rounded(BATCH * CONTEXT * (RANK + ROTATED) * DTYPE.itemsize / own / 1e9),
        "layer_us": rounded(layer * 1e6),
        "layer_to_bare": rounded(bare_layer_seconds / layer),
        "largest_difference": difference,
    }


def measure_prefill() -> dict[str, float]:
    import flashinfer  # pyright: ignore[reportMissingImports]

    case = Case(1, 0, PROMPT)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda"), "NHD"
    )
    indptr = torch.tensor([0, PROMPT], dtype=torch.int32)
    width = HEADS.key_dim + ROTATED
    wrapper.plan(
        indptr, indptr, NUM_HEADS, NUM_HEADS, width, HEADS.value_dim, causal=True, sm_scale=SCALE, q_data_type=DTYPE
    )
    keys = torch.randn(PROMPT, NUM_HEADS, width, dtype=DTYPE, device="cuda")
    values = torch.randn(PROMPT, NUM_HEADS, HEADS.value_dim, dtype=DTYPE, device="cuda")
    case.layer()
    bare, layer = seconds(lambda: wrapper.run(case.q, keys, values)), seconds(case.layer)
    return {
        "bare_ms": rounded(bare * 1e3),
        "bare_tflops": rounded(PROMPT**2 * NUM_HEADS * (width + HEADS.value_dim) / bare / 1e12),
        "layer_ms": rounded(layer * 1e3),
        "layer_to_bare": rounded(bare / layer),
    }


def main() -> None:
    if not torch.cuda.is_available():
        print_skipped("needs a CUDA device")
        return
    with torch.inference_mode():
        decode, prefill = measure_decode(), measure_prefill()
    print_result(
        {
            "device": torch.cuda.get_device_name(),
            f"decode of {BATCH} at {CONTEXT}": decode,
            f"prefill of {PROMPT}": prefill,
            "targets": [
                at_least("MLA decode attention, bare FlashInfer ÷ ours", decode["attention_to_bare"], 0.95),
                at_least("MLA decode layer, bare FlashInfer and the maps ÷ ours", decode["layer_to_bare"], 0.95),
            ],
        }
    )


if __name__ == "__main__":
    main()
