"""Token trees on a GPU: 64 nodes × 32 sequences at context 4K, against as many plain tokens; prints JSON.

Through the cache, append and attention of one layer together: plain in Qwen3-8B's heads, in a window in gpt-oss-20b's,
over latents in DeepSeek-V3's, with the maps between them and K and V. The chain is what verifies one guess of 64 tokens
a sequence."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from tandem.cache.kinds.kv import KV
from tandem.cache.kinds.latent import Latent
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.latent import LatentHeads, UpProjections
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.rope import RopeParameters
from tandem.cache.plan.spans import span_of
from tests.benchmarks.device_time import device_seconds
from tests.benchmarks.options import Budget, add_seconds, benchmark_parser
from tests.benchmarks.results import at_most, print_result, print_skipped
from tests.support.kinds import latent_rank
from tests.support.tvm_cache import TvmCache

PAGE_SIZE, LAYERS, LAYER = 16, 4, 1
DTYPE = torch.bfloat16
BATCH, CONTEXT, NODES = 32, 4096, 64
BRANCHING = {"binary": 2, "of 8 branches": 8, "chain": 1}
HEADS = LatentHeads(key_dim=128, value_dim=128)


@dataclass(frozen=True)
class Shape:
    """num_kv_heads None: latents."""

    num_q_heads: int
    num_kv_heads: int | None
    head_dim: int = 128
    window: int | None = None

    @property
    def group(self) -> LayerGroup:
        layers = tuple(range(LAYERS))
        if self.num_kv_heads is None:
            return LayerGroup(layers, Latent(576, 512))
        return LayerGroup(layers, KV(self.num_kv_heads, self.head_dim, span_of(self.window)))


SHAPES = {"plain": Shape(32, 8), "window": Shape(64, 8, 64, 128), "latents": Shape(128, None)}


class Case:
    """All sequences append NODES tokens behind CONTEXT positions, plain ones or nodes of trees."""

    def __init__(self, shape: Shape, parents: list[list[int]] | None) -> None:
        group = shape.group
        layout = KVLayout((group,), PAGE_SIZE, DTYPE)
        num_pages = BATCH * -(-(CONTEXT + NODES) // PAGE_SIZE)
        latent = latent_rank(group) is not None
        self.cache = TvmCache(
            layout,
            (torch.randn((num_pages, *layout.page_shape(0)), dtype=DTYPE, device="cuda"),),
            max_sequences=BATCH,
            max_sequence_length=CONTEXT + NODES,
            rope=RopeParameters("default", 64 if latent else shape.head_dim),
            writer=None,
            latent=HEADS if latent else None,
        )
        ids = list(range(BATCH))
        for sequence in ids:
            self.cache.add_sequence(sequence)
        self.cache.begin_forward(ids, [CONTEXT] * BATCH)  # what is cached is the pool's noise
        self.plan = self.cache.begin_forward(ids, [NODES] * BATCH, token_tree_parents=parents)
        self.layer = self._latent_layer(shape) if latent else self._layer(shape)

    def _layer(self, shape: Shape) -> Callable[[], Tensor]:
        heads = (shape.num_q_heads, shape.group.num_kv_heads, shape.group.num_kv_heads)
        q, k, v = draw(sum(heads), shape.head_dim).split(heads, 1)
        return lambda: self.cache.attention(self.plan, LAYER, q, k, v)

    def _latent_layer(self, shape: Shape) -> Callable[[], Tensor]:
        q, (latents, keys) = draw(shape.num_q_heads, 192), draw(1, 576)[:, 0].split((512, 64), 1)
        weight = torch.randn(shape.num_q_heads, HEADS.key_dim + HEADS.value_dim, 512, dtype=DTYPE, device="cuda")
        up = UpProjections(weight * 512**-0.5, HEADS)
        return lambda: self.cache.latent_attention(self.plan, LAYER, q, latents, keys, up)


def draw(heads: int, width: int) -> Tensor:
    return torch.randn(BATCH * NODES, heads, width, dtype=DTYPE, device="cuda")


def draw_trees(branching: int) -> list[list[int]]:
    """Each node hangs on one of the last `branching` before it."""
    random = Random(branching)
    return [[random.randint(max(-1, node - branching), node - 1) for node in range(NODES)] for _ in range(BATCH)]


def measure(shape: Shape) -> dict[str, float]:
    """Microseconds of the chain, before and after, and of the trees."""
    plain = Case(shape, None)
    found = {"plain tokens": device_seconds(plain.layer, 400)}
    for name, branching in BRANCHING.items():
        found[name] = device_seconds(Case(shape, draw_trees(branching)).layer, 400)
    found["plain tokens again"] = device_seconds(plain.layer, 400)
    return {name: value.scaled(1e6) for name, value in found.items()}


def main() -> None:
    parser = benchmark_parser(__file__, __doc__)
    parser.add_argument("shapes", nargs="*", default=list(SHAPES), metavar="SHAPE", help=f"of {', '.join(SHAPES)}; all")
    add_seconds(parser)
    options = parser.parse_args()
    if wrong := set(options.shapes) - set(SHAPES):
        parser.error(f"SHAPE is {', '.join(wrong)}; it must be of {', '.join(SHAPES)}")
    budget = Budget(options.seconds)
    if not torch.cuda.is_available():
        print_skipped("needs a CUDA device")
        return
    with torch.inference_mode():
        found = {name: measure(SHAPES[name]) for name in budget.within(options.shapes)}
    print_result(
        {
            "device": torch.cuda.get_device_name(),
            "us": found,
            "targets": [
                at_most(
                    f"{name}: tree {tree} ÷ chain", of[tree] / min(of["plain tokens"], of["plain tokens again"]), 1.3
                )
                for name, of in found.items()
                for tree in BRANCHING
            ],
        },
        options,
        gpus=1,
    )


if __name__ == "__main__":
    main()
