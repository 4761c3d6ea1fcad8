"""Token trees on a naive cache: each path of a tree is a sequence of its own that comes token by token."""

from dataclasses import dataclass, field
from random import Random

import torch
from torch import Tensor

from tests.cache.naive import Inputs, NaiveCache
from tests.support.tolerances import assert_close
from tests.support.tvm_cache import TvmCache

BASE = -1  # the parent of roots


def draw_parents(random: Random, nodes: int, count: int) -> list[int]:
    """Draws the parents of `count` more nodes of a tree that has `nodes`: chains, bushes and several roots."""
    width = random.choice([1, 2, 5, nodes + count])
    return [random.randint(max(BASE, node - width), node - 1) for node in range(nodes, nodes + count)]


@dataclass
class NaiveTrees:
    """parents: of the nodes of each open tree. The naive cache holds plain sequences by their ids, and the path to
    node j of a tree as the sequence key(sequence, j)."""

    naive: NaiveCache
    parents: dict[int, list[int]] = field(default_factory=dict)

    def run(
        self, seq_ids: list[int], parents: list[list[int] | None], lengths: list[int], inputs: Inputs
    ) -> list[Tensor]:
        outputs, begin = [], 0
        for sequence, added, count in zip(seq_ids, parents, lengths, strict=True):
            own = inputs.between(begin, begin + count)
            outputs.append(
                self.naive.run([sequence], [count], own) if added is None else self._grow(sequence, added, own)
            )
            begin += count
        return [torch.cat(layers) for layers in zip(*outputs, strict=True)]

    def _grow(self, sequence: int, added: list[int], inputs: Inputs) -> list[Tensor]:
        tree = self.parents.setdefault(sequence, [])
        outputs = []
        for index, parent in enumerate(added):
            path = key(sequence, len(tree))
            of = sequence if parent == BASE else key(sequence, parent)
            self.naive.fork(of, path, self.naive.sequences[of].length)
            outputs.append(self.naive.run([path], [1], inputs.between(index, index + 1)))
            tree.append(parent)
        return [torch.cat(layers) for layers in zip(*outputs, strict=True)]

    def commit(self, sequence: int, leaf: int) -> None:
        if leaf != BASE:
            self.naive.fork(key(sequence, leaf), sequence, self.naive.sequences[key(sequence, leaf)].length)
        for node in range(len(self.parents.pop(sequence))):
            self.naive.remove(key(sequence, node))

    def pop(self, sequence: int, count: int) -> None:
        for _ in range(count):
            self.parents[sequence].pop()
            self.naive.remove(key(sequence, len(self.parents[sequence])))


def key(sequence: int, node: int) -> int:
    return 1000 * (sequence + 1) + node


def check_kv(cache: TvmCache, naive: NaiveCache, sequence: int) -> None:
    """Compares the KV of a sequence without an open tree."""
    length, begin = naive.sequences[sequence].length, cache.first_position(sequence)
    assert cache.num_tokens(sequence) == length
    for layer, (k, v) in enumerate(cache.gather_kv(sequence, begin, length)):
        assert_close(k, naive.sequences[sequence].keys[layer][begin:])
        assert torch.equal(v.double(), naive.sequences[sequence].values[layer][begin:])
