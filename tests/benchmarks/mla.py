"""Latent attention in DeepSeek-V3's shapes through the cache, against FlashInfer's bare wrappers; prints JSON.

decode: a batch of single tokens. attention: the bare MLA wrapper, with its own plan, on a pool of one layer ÷ the same
kernel with ours on a layer of the cache's pool. layer: the bare wrapper between the two maps that absorb K's and V's ÷
latent_attention, which also rotates and appends. prefill: one prompt; the bare ragged wrapper on K and V that are there
÷ latent_attention, which also gathers and expands them.
layer_to_like: of a mix, ÷ that of as many rows and positions in all, where the rows are alike. layer_8_bits: of latents
stored in 8 bits.
All times are of CUDA graphs.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.cache.kernels.flashinfer.latent import FlashInferLatentKernels
from tandem.cache.kinds.latent import Latent
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.kv_scales import KVScales
from tandem.cache.plan.latent import LatentHeads, UpProjections
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.rope import RopeParameters
from tests.benchmarks.contexts import MIXES, Contexts, Lengths
from tests.benchmarks.device_time import graph_seconds
from tests.benchmarks.options import add_list, benchmark_parser
from tests.benchmarks.results import at_least, at_most, print_result, print_skipped, rounded
from tests.support.tvm_cache import TvmCache

NUM_HEADS, RANK, ROTATED, PAGE_SIZE, LAYERS, LAYER = 128, 512, 64, 16, 4, 1
HEADS = LatentHeads(key_dim=128, value_dim=128)
SCALE = (HEADS.key_dim + ROTATED) ** -0.5
DTYPE = torch.bfloat16
ROWS, CONTEXT, PROMPT = 64, Contexts("4096"), 8192
LIKE_LIMIT = 1.08
PARTS = ("decode", "prefill")
WORKSPACE_BYTES = 256 << 20


class Case:
    """Sequences that hold cached[i] positions, and append `new` ones each."""

    def __init__(self, cached: Lengths, new: int, *, fp8: bool = False) -> None:
        group = LayerGroup(tuple(range(LAYERS)), Latent(RANK + ROTATED, RANK))
        layout = KVLayout((group,), PAGE_SIZE, DTYPE, KVScales.uniform(LAYERS) if fp8 else None)
        sequences = cached.size
        num_pages = int((-(-(cached + new) // PAGE_SIZE)).sum())
        rows, shape = layout.fp8_rows(0), (num_pages, *layout.page_shape(0)[:-1], RANK + ROTATED)
        self.pool = torch.randn(shape, dtype=DTYPE, device="cuda")
        if rows is not None:  # some pages at a time, for what lies between is of float32
            stored = [rows.quantize(pages).view(torch.uint8) for pages in self.pool.split(64)]
            self.pool = torch.cat(stored).view(layout.stored_dtype_of(0))
        self.cache = TvmCache(
            layout,
            (self.pool,),
            max_sequences=sequences,
            max_sequence_length=int(cached.max()) + new,
            rope=RopeParameters("default", ROTATED),
            writer=None,
            latent=HEADS,
        )
        ids = list(range(sequences))
        for sequence in ids:
            self.cache.add_sequence(sequence)
        if cached.any():  # the pool's noise
            self.cache.begin_forward(ids, cached.tolist())
        self.plan = self.cache.begin_forward(ids, [new] * sequences)
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


def measure_decode(rows: int, context: Contexts) -> dict[str, float | None]:
    import flashinfer  # pyright: ignore[reportMissingImports]  # comes with the extras cuda12 and cuda13

    lengths = context.lengths(rows)
    case = Case(lengths - 1, 1)
    tables = case.plan.attention.plans[0].tables
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(
        torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    )
    wrapper.plan(
        torch.arange(rows + 1, dtype=torch.int32),
        *(torch.from_numpy(array) for array in (tables.kv_indptr, tables.kv_indices, tables.kv_lens)),
        *(NUM_HEADS, RANK, ROTATED, PAGE_SIZE, False, SCALE, DTYPE, DTYPE),
    )
    actual = case.layer()  # plans the cache's own wrapper
    latents, keys = (part.contiguous() for part in case.pool[:, LAYER, 0, 0].split((RANK, ROTATED), 2))
    wide, rotated = case.absorbed()
    kernels = case.cache._groups[0].backend
    assert isinstance(kernels, FlashInferLatentKernels)
    bare = graph_seconds(lambda: wrapper.run(wide, rotated, latents, keys))
    own = graph_seconds(lambda: kernels._absorbed.run(wide, rotated, *kernels._layers[LAYER]))

    def bare_layer() -> Tensor:
        return case.up.values(wrapper.run(*case.absorbed(), latents, keys))

    difference = float((actual.float() - bare_layer().float()).abs().max())
    bare_layer_seconds, layer = graph_seconds(bare_layer), graph_seconds(case.layer)
    in_8_bits = graph_seconds(Case(lengths - 1, 1, fp8=True).layer)
    like = None
    if context.is_mix:
        like = rounded(layer / graph_seconds(Case(context.alike(rows).lengths(rows) - 1, 1).layer))
    return {
        "attention_us": own.scaled(1e6),
        "attention_to_bare": rounded(bare / own),
        "latents_gb_per_s": rounded(lengths.sum() * (RANK + ROTATED) * DTYPE.itemsize / own / 1e9),
        "layer_us": layer.scaled(1e6),
        "layer_to_bare": rounded(bare_layer_seconds / layer),
        "layer_8_bits_us": in_8_bits.scaled(1e6),
        "layer_to_8_bits": rounded(layer / in_8_bits),
        "layer_to_like": like,
        "largest_difference": difference,
    }


def measure_prefill(prompt: int) -> dict[str, float]:
    import flashinfer  # pyright: ignore[reportMissingImports]

    case = Case(np.zeros(1, np.int64), prompt)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda"), "NHD"
    )
    indptr = torch.tensor([0, prompt], dtype=torch.int32)
    width = HEADS.key_dim + ROTATED
    wrapper.plan(
        indptr, indptr, NUM_HEADS, NUM_HEADS, width, HEADS.value_dim, causal=True, sm_scale=SCALE, q_data_type=DTYPE
    )
    keys = torch.randn(prompt, NUM_HEADS, width, dtype=DTYPE, device="cuda")
    values = torch.randn(prompt, NUM_HEADS, HEADS.value_dim, dtype=DTYPE, device="cuda")
    case.layer()
    bare, layer = graph_seconds(lambda: wrapper.run(case.q, keys, values)), graph_seconds(case.layer)
    return {
        "bare_ms": bare.scaled(1e3),
        "bare_tflops": rounded(prompt**2 * NUM_HEADS * (width + HEADS.value_dim) / bare / 1e12),
        "layer_ms": layer.scaled(1e3),
        "layer_to_bare": rounded(bare / layer),
    }


def targets_of(results: dict[str, Any]) -> list[dict[str, Any]]:
    mixed = [
        at_most(f"MLA, {name} ÷ like contexts", numbers["layer_to_like"], LIKE_LIMIT)
        for name, numbers in results.items()
        if isinstance(numbers, dict) and numbers.get("layer_to_like") is not None
    ]
    decode = results.get(f"decode of {ROWS} at {CONTEXT}")
    if decode is None:
        return mixed
    return [
        at_least("MLA decode attention, bare FlashInfer ÷ ours", decode["attention_to_bare"], 0.95),
        at_least("MLA decode layer, bare FlashInfer and the maps ÷ ours", decode["layer_to_bare"], 0.95),
    ]


def main() -> None:
    parser = benchmark_parser(__file__, __doc__)
    parser.add_argument("--rows", type=int, default=ROWS, help="sequences that decode")
    parser.add_argument(
        "--context", type=Contexts.parse, default=CONTEXT, help=f"positions of each of them, or {', '.join(MIXES)}"
    )
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens")
    add_list(parser, "--parts", default=PARTS, choices=PARTS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print_skipped("needs a CUDA device")
        return
    results: dict[str, Any] = {}
    with torch.inference_mode():
        if "decode" in options.parts:
            results[f"decode of {options.rows} at {options.context}"] = measure_decode(options.rows, options.context)
        if "prefill" in options.parts:
            results[f"prefill of {options.prompt}"] = measure_prefill(options.prompt)
    device = {"device": torch.cuda.get_device_name()}
    print_result(device | results | {"targets": targets_of(results)}, options, gpus=1)


if __name__ == "__main__":
    main()
