"""The caches that random programs run on."""

from dataclasses import replace

import torch

from tandem.cache.kernels.torch.kernels import TorchKernels
from tandem.cache.kinds.compressed import Beside
from tandem.cache.kinds.index import IndexKeys
from tandem.cache.kinds.kv import KV
from tandem.cache.kinds.latent import Latent
from tandem.cache.kinds.shared import Shared
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.kv_scales import KVScales
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.spans import ALL, Chunk, Every, Window
from tests.cache.naive import HEAD_DIM, ROPE, spanned, windowed
from tests.cache.oracle import Setting

PLAIN = KVLayout((LayerGroup((1,), KV(1, HEAD_DIM)), LayerGroup((0,), KV(2, HEAD_DIM))), 4, torch.float32)
ONE_GROUP = KVLayout((LayerGroup((0,), KV(2, HEAD_DIM)),), 1, torch.float32)
LATENTS = KVLayout((LayerGroup((1,), Latent(12, 8)), LayerGroup((0,), KV(2, HEAD_DIM))), 4, torch.float32)
# The first layer keeps K and V; the second chooses by its index, and the third attends to what that has chosen.
INDEXED = KVLayout(
    (
        LayerGroup((0,), KV(2, HEAD_DIM)),
        LayerGroup((1, 2), Latent(12, 8)),
        LayerGroup((1,), IndexKeys(10, 6, 5)),
    ),
    4,
    torch.float32,
)
ROWS = KVLayout((LayerGroup((1, 0), Latent(12, 8)),), 4, torch.float32, KVScales.uniform(2))
INDEXED_ROWS = replace(ROWS, groups=(LayerGroup((0, 1), Latent(12, 8)), LayerGroup((0,), IndexKeys(10, 6, 5))))
# As in DeepSeek-V4: layers keep compressed KV of 4 and of 6 positions and, of single positions in a window, what
# that is made of. A page covers 4 positions, or 12.
COMPRESSED = replace(
    PLAIN,
    groups=(
        *PLAIN.groups,
        LayerGroup((1,), Beside(1, 6, Every(4), planes=1)),
        LayerGroup((0, 1), Beside(1, 4, Every(6))),
        LayerGroup((1,), Beside(1, 5, Window(6), dtype=torch.float16)),
    ),
)
# Layer 0 has a window alone; 1 entries of 4 positions that overlap, of which queries choose 2; 2 entries of 6.
SHARED = KVLayout(
    (
        LayerGroup((1, 0, 2), Shared(HEAD_DIM, Window(7))),
        LayerGroup((1,), Beside(1, 2 * (HEAD_DIM + 6), Window(8))),
        LayerGroup((1,), Beside(1, HEAD_DIM, Every(4), planes=1)),
        LayerGroup((1,), Beside(1, 6, Every(4), planes=1, top_k=2)),
        LayerGroup((2,), Beside(1, HEAD_DIM, Window(6))),
        LayerGroup((2,), Beside(1, HEAD_DIM, Every(6), planes=1)),
    ),
    4,
    torch.float32,
)
READERS = replace(PLAIN, readers=((2, 0), (3, 1)))
SINKS = (0.5, -1.0, 3.0, 0.0)

SETTINGS = {
    "two groups": Setting(PLAIN, ROPE),
    "torch kernels, mostly streams, readers": Setting(READERS, ROPE, kernels=TorchKernels, streams=0.8),
    "page of 1, softcap and sinks": Setting(ONE_GROUP, ROPE, softcap=2.0, sinks=SINKS),
    "latents": Setting(LATENTS, ROPE),
    "index keys": Setting(INDEXED, ROPE),
    "latents in 8 bits": Setting(ROWS, ROPE),
    "index keys in 8 bits": Setting(INDEXED_ROWS, ROPE),
    "compressed": Setting(COMPRESSED, ROPE),
    "compressed, windows": Setting(spanned(COMPRESSED, Window(7), Window(7), Every(4), Every(8), Window(8)), ROPE),
    "compressed, in one plane": Setting(SHARED, replace(ROPE, rotary_dim=4), sinks=SINKS),
    "window of 7": Setting(windowed(PLAIN, None, 7), ROPE, sinks=SINKS),
    "chunks of 8": Setting(spanned(PLAIN, ALL, Chunk(8)), ROPE, sinks=SINKS),
    "chunks of 4 and 12": Setting(spanned(PLAIN, Chunk(4), Chunk(12)), ROPE, kernels=TorchKernels),
    "windows of 4 and 13, readers": Setting(windowed(READERS, 4, 13), ROPE, softcap=2.0),
}
