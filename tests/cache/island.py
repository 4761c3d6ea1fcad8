"""Caches whose pages one of them can write into, for tests."""

from dataclasses import dataclass

from tandem.cache.plan.layout import KVLayout
from tests.cache.naive import MAX_LENGTH, ROPE, draw_inputs, pools_of, run
from tests.cache.peer_writer import PeerWriter
from tests.support.tvm_cache import TvmCache


@dataclass
class Island:
    """caches[0] sends to the others."""

    caches: list[TvmCache]
    writer: PeerWriter

    @classmethod
    def of(cls, layout: KVLayout, num_caches: int = 2, num_pages: int = 24) -> "Island":
        pools = [pools_of(layout, num_pages) for _ in range(num_caches)]
        writers = [PeerWriter(pe, pools) for pe in range(num_caches)]
        caches = [
            TvmCache(layout, own, max_sequences=8, max_sequence_length=MAX_LENGTH, rope=ROPE, writer=writers[pe])
            for pe, own in enumerate(pools)
        ]
        return cls(caches, writers[0])


def forward(cache: TvmCache, sequence: int, count: int, seed: int = 0, *, push: bool = True) -> None:
    run(cache, [sequence], [count], draw_inputs(cache.layout, count, seed), push=push)
