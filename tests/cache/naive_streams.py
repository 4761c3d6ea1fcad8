"""A StreamingLLM that keeps its tokens in a list, to compare sequences that slide with."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.rope import RotaryEmbedding
from tandem.cache.plan.spans import ALL, Span
from tests.cache.naive import HEAD_DIM, ROPE, Inputs, attend
from tests.support.tolerances import assert_close
from tests.support.tvm_cache import TvmCache

ROTARY = RotaryEmbedding(ROPE, 4096, "cpu", torch.float64)


def rotated(x: Tensor, begin: int) -> Tensor:
    return ROTARY.rotation(torch.arange(begin, begin + x.shape[0])).apply(x.double())


@dataclass
class NaiveStream:
    """kept: the positions that are there; keys, values: per layer theirs, [n, heads, head_dim], not rotated."""

    window: int
    sink: int
    keys: list[Tensor]
    values: list[Tensor]
    length: int = 0
    kept: list[int] = field(default_factory=list)
    evict_after: bool = False
    rotated: int = 0
    """The cache stores K rotated of positions before this one."""
    spans: Mapping[int, Span] = field(default_factory=dict)
    """The spans of layers that do not see all that is kept: they go by the positions of the text."""

    @classmethod
    def of(cls, layout: KVLayout, window: int, sink: int, *, evict_after: bool = False) -> "NaiveStream":
        empty = [torch.empty(0, heads, HEAD_DIM) for _, heads in sorted(heads_of(layout).items())]
        spans = {layer: group.keeps for group in layout.groups for layer in group.layers}
        return cls(window, sink, list(empty), list(empty), evict_after=evict_after, spans=spans)

    def fork(self, length: int, window: int, sink: int, *, rotated: int) -> "NaiveStream":
        """Makes a stream of the first positions, which are there."""
        keys, values = ([x[:length] for x in of] for of in (self.keys, self.values))
        return NaiveStream(window, sink, keys, values, length, self.kept[:length], rotated=rotated, spans=self.spans)

    def evict(self, append: int) -> None:
        append = 0 if self.evict_after else append
        excess = min(len(self.kept) + append - self.window, len(self.kept) - self.sink)
        if excess > 0:
            left = [*range(self.sink), *range(self.sink + excess, len(self.kept))]
            self.kept = [self.kept[index] for index in left]
            self.keys = [k[left] for k in self.keys]
            self.values = [v[left] for v in self.values]

    def run(self, count: int, inputs: Inputs, sinks: Tensor | None = None) -> list[Tensor]:
        self.evict(count)
        self.kept += range(self.length, self.length + count)
        self.length += count
        outputs = []
        for layer, (q, k, v) in enumerate(inputs.layers):
            self.keys[layer] = torch.cat((self.keys[layer], k))
            self.values[layer] = torch.cat((self.values[layer], v))
            stored = len(self.kept)
            own, keys, values = rotated(q, stored - count), rotated(self.keys[layer], 0), self.values[layer].double()
            span, positions = self.spans.get(layer, ALL), torch.tensor(self.kept)
            outputs.append(attend(own, keys, values, span=span, sinks=sinks, positions=positions))
        return outputs

    def pop(self, count: int) -> None:
        self.length -= count
        self.kept, left = self.kept[: len(self.kept) - count], slice(len(self.kept) - count)
        self.keys, self.values = [k[left] for k in self.keys], [v[left] for v in self.values]


def heads_of(layout: KVLayout) -> dict[int, int]:
    return {layer: group.num_kv_heads for group in layout.groups for layer in group.layers}


def check_contents(cache: TvmCache, sequence: int, naive: NaiveStream) -> None:
    """Compares what is kept bit for bit. What is not kept is refused."""
    assert cache.num_tokens(sequence) == naive.length
    recent = [position for position in naive.kept if position >= naive.sink]
    begin = recent[0] if recent else naive.length
    for first, end in ((0, min(naive.sink, naive.length)), (begin, naive.length)):
        indices = [naive.kept.index(position) for position in range(first, end)]
        turned = max(min(naive.rotated, end) - first, 0)
        for layer, (k, v) in enumerate(cache.gather_kv(sequence, first, end)):
            assert_close(k[:turned], rotated(naive.keys[layer][indices[:turned]], first))
            assert torch.equal(k[turned:], naive.keys[layer][indices[turned:]])
            assert torch.equal(v, naive.values[layer][indices])
    if begin > naive.sink:
        with pytest.raises(InvalidArgument, match=rf"positions {naive.sink} … {begin - 1} have left the window"):
            cache.gather_kv(sequence, begin - 1, begin)
