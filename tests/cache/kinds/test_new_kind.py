"""CONTRIBUTING's list for a kind of state, followed with a kind that stores K negated."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tandem.cache.kernels.base import QKV, GroupPlan, KVBackend, Part, Query
from tandem.cache.kernels.choice import choose_kernels
from tandem.cache.kernels.scoring import Scoring
from tandem.cache.kernels.torch.attention import StoredParts
from tandem.cache.kernels.torch.kernels import TorchKernels, TorchPlan
from tandem.cache.kinds.kind import Site, kind_of
from tandem.cache.kinds.kv import KV
from tandem.cache.plan.arrays import Int32Array
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.kind import Kind, LayerGroup
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.rope import Rotation
from tandem.cache.plan.spans import ALL, Span, Window
from tests.cache.naive import HEAD_DIM, ROPE, cache_of
from tests.cache.oracle import Oracle, Setting
from tests.cache.program import QUERY_HEADS, Program

ROOT = Path(__file__).parents[3]


class NegatedKernels(TorchKernels):
    """Scores of -q and -K equal scores of q and K."""

    def append(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None, own: TorchPlan
    ) -> tuple[Tensor, Tensor]:
        return super().append(layer, -q, -k, v, rotation, own)

    def read(self, plan: GroupPlan, layer: int, x: Query) -> Tensor:
        return super().read(plan, layer, x._replace(q=-x.q))

    def read_part(self, own: StoredParts, layer: int, q: Tensor) -> Part:
        return super().read_part(own, layer, -q)

    def read_slots(self, layer: int, slots: Int32Array) -> tuple[Tensor, Tensor]:
        k, v = super().read_slots(layer, slots)
        return -k, v


@dataclass(frozen=True)
class NegatedKV(KV):
    no_sliding = "negated K"  # evicted sequences are rotated anew from what read_slots() gives

    def backend(self, site: Site) -> KVBackend:
        scoring = Scoring(site.heads.scale_of(self.head_dim), self.keeps.window, site.heads.softcap)
        return NegatedKernels(site.pool, scoring, site.fp8)


class Packed(NamedTuple):
    """q [T, num_q_heads, D] and kv [T, num_kv_heads, 2 · D]."""

    q: Tensor
    kv: Tensor


class PackedKernels(NegatedKernels):
    def run(self, plan: GroupPlan, layer: int, x: Any, appended: Any = None) -> Tensor:
        return super().run(plan, layer, QKV(x.q, *x.kv.chunk(2, 2)), appended)


@dataclass(frozen=True)
class PackedKV(NegatedKV):
    """One that no call of Attention but run() serves."""

    takes = Packed
    serves = "run"
    holds = "packed K and V"

    def backend(self, site: Site) -> Any:
        return PackedKernels(site.pool, Scoring(site.heads.scale_of(self.head_dim)))

    def check_inputs(self, num_tokens: int, x: Any, site: Site) -> None:
        super().check_inputs(num_tokens, QKV(x.q, *x.kv.chunk(2, 2)), site)


def layout_of(kind: Kind) -> KVLayout:
    return KVLayout((LayerGroup((0, 1), kind),), 4, torch.float32)


@pytest.mark.parametrize("window", [None, Window(7)])
def test_random_programs_compare_it(window: Window | None) -> None:
    kinds = NegatedKV(1, HEAD_DIM), KV(2, HEAD_DIM), NegatedKV(2, HEAD_DIM, *([] if window is None else [window]))
    groups = tuple(LayerGroup((layer,), kind) for layer, kind in enumerate(kinds))
    setting = Setting(KVLayout(groups, 4, torch.float32, readers=((3, 0),)), ROPE)
    program = Program(0, setting, Oracle(setting, QUERY_HEADS))
    program.run(350)
    assert program.counts.keys() >= {"forks", "forwards", "sends", "steps", "landings", "matches", "commits"}


def test_its_layers_attend_through_run() -> None:
    kinds, outputs = (KV(2, HEAD_DIM), PackedKV(2, HEAD_DIM)), []
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(5, heads, HEAD_DIM, generator=generator) for heads in (QUERY_HEADS, 2, 2))
    for kind in kinds:
        cache = cache_of(layout_of(kind), kernels=choose_kernels)
        cache.add_sequence(0)
        attention = cache.begin_forward([0], [5]).attention
        with torch.inference_mode():
            if kind.takes is Packed:
                with pytest.raises(InvalidArgument, match=r"layer is 0, which keeps packed K and V; run\(\) serves it"):
                    attention.attend(0, q, k, v)
                outputs.append(attention.run(0, Packed(q, torch.cat((k, v), 2))))
            else:
                with pytest.raises(InvalidArgument, match=r"layer is 0, which keeps K and V; attend\(\) serves it"):
                    attention.run(0, Packed(q, k))
                outputs.append(attention.run(0, QKV(q, k, v)))
    torch.testing.assert_close(*outputs)


def test_what_it_refuses_is_refused() -> None:
    cache = cache_of(layout_of(NegatedKV(1, HEAD_DIM)))
    cache.add_sequence(0)
    with pytest.raises(InvalidArgument, match="the layout has groups with negated K; sequences slide only"):
        cache.enable_sliding_window(0, 8, 2)


def test_its_pages_are_those_of_no_other_kind() -> None:
    kinds = KV(1, HEAD_DIM), NegatedKV(1, HEAD_DIM), PackedKV(1, HEAD_DIM), replace(NegatedKV(1, HEAD_DIM), head_dim=4)
    assert len({layout_of(kind).fingerprint for kind in kinds}) == len(kinds)


def test_a_kind_that_nothing_serves_is_refused() -> None:
    @dataclass(frozen=True)
    class Unserved(Kind):
        num_kv_heads: int = 1
        head_dim: int = 8
        keeps: Span = ALL

    with pytest.raises(InvalidArgument, match=r"kind is .*Unserved.*; it must be a kind of tandem.cache.kinds"):
        kind_of(LayerGroup((0,), Unserved()))


def test_the_recipe_names_what_there_is() -> None:
    recipe = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    recipe = recipe.partition("### A kind of state")[2].partition("###")[0]
    paths = [path for path in re.findall(r"`([\w/<>]+\.py)`", recipe) if "<" not in path]
    assert len(paths) >= 5
    assert [path for path in paths if not (ROOT / path).is_file()] == []
