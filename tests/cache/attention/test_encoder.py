"""Layers that attend to an encoder's entries, which are a sequence's first positions, against a naive cache."""

from dataclasses import dataclass, field, replace
from random import Random

import pytest
import torch
from torch import Tensor

from tandem.cache.digest import digest_kv
from tandem.cache.kernels.base import KernelFactory
from tandem.cache.kernels.choice import choose_kernels
from tandem.cache.kernels.torch.kernels import TorchKernels
from tandem.cache.kinds.compressed import Beside
from tandem.cache.kinds.given import GivenKV
from tandem.cache.kinds.kv import KV
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.kv_scales import KVScales
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.rope import RopeParameters
from tandem.cache.plan.spans import ALL, Every, Window
from tests.cache.naive import (
    HEAD_DIM,
    MAX_LENGTH,
    QUERY_HEADS,
    ROPE,
    Inputs,
    NaiveCache,
    attend,
    cache_of,
    draw_inputs,
    groups_by_layer,
    pools_of,
    round_by,
)
from tests.cache.peer_writer import PeerWriter
from tests.support.tolerances import assert_close
from tests.support.tvm_cache import TvmCache

SIZE = 4
LAYOUT = KVLayout(
    (
        LayerGroup((0, 2), KV(2, HEAD_DIM, Window(6))),
        LayerGroup((1,), KV(2, HEAD_DIM)),
        LayerGroup((3, 4, 5), GivenKV(2, HEAD_DIM)),
    ),
    SIZE,
    torch.float32,
)
PLAIN = KVLayout((LayerGroup((0,), KV(1, HEAD_DIM)), LayerGroup((1,), GivenKV(2, HEAD_DIM))), SIZE, torch.float32)
LAYOUTS = {"a window": LAYOUT, "all": PLAIN, "8 bits": replace(LAYOUT, scales=KVScales.uniform(6, 0.03, 0.04))}
KERNELS = [TorchKernels, choose_kernels]
SOFTCAP = 3.0
BATCHES = [([1, 2, 3], [1, 5, 9]), ([3, 1, 2], [1, 1, 1]), ([2, 1], [7, 1]), ([1, 2, 3], [1, 3, 2])]


def given_layers(layout: KVLayout) -> list[int]:
    return [layer for group in layout.groups if group.keeps.given for layer in group.layers]


def ropes_of(layout: KVLayout) -> list[RopeParameters]:
    return [RopeParameters("none", 0) if group.keeps.given else ROPE for group in layout.groups]


def encoder_cache(layout: KVLayout, kernels: KernelFactory = choose_kernels, num_pages: int = 32) -> TvmCache:
    return cache_of(layout, num_pages, ropes_of(layout), kernels, softcap=SOFTCAP)


class ShiftedCache(NaiveCache):
    """A NaiveCache in which each sequence's first token stands at position `shift`."""

    shift = 0

    def _rotated(self, layer: int, x: Tensor, positions: Tensor) -> Tensor:
        return super()._rotated(layer, x, positions + self.shift)


def sending_cache(layout: KVLayout, pe: int, pools: list[tuple[Tensor, ...]]) -> TvmCache:
    return cache_of(layout, 0, ropes_of(layout), pools=pools[pe], writer=PeerWriter(pe, pools))


@dataclass
class NaiveEncoders:
    """own: what the layers with entries of their own keep. given: K and V of the encoder's positions alone."""

    layout: KVLayout
    own: ShiftedCache = field(init=False)
    given: dict[int, dict[int, tuple[Tensor, Tensor]]] = field(default_factory=dict)
    borders: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.own = ShiftedCache(self.layout, ropes_of(self.layout), softcap=SOFTCAP)

    def encode(self, sequence: int, encoder_len: int, stored: dict[int, tuple[Tensor, Tensor]]) -> None:
        self.borders[sequence] = -(-encoder_len // SIZE) * SIZE
        self.given[sequence] = {
            layer: self._stored(layer, k[:encoder_len], v[:encoder_len]) for layer, (k, v) in stored.items()
        }
        self.own.add(sequence)

    def fork(self, parent: int, child: int, length: int) -> None:
        self.given[child], self.borders[child] = self.given[parent], self.borders[parent]
        self.own.fork(parent, child, length - self.borders[parent])

    def pop(self, sequence: int, count: int) -> None:
        self.own.pop(sequence, count)

    def length(self, sequence: int) -> int:
        return self.borders[sequence] + self.own.sequences[sequence].length

    def run(self, sequences: list[int], lengths: list[int], inputs: Inputs) -> list[Tensor]:
        parts, begin = [], 0
        for sequence, length in zip(sequences, lengths, strict=True):
            self.own.shift = self.borders[sequence]
            parts.append(self.own.run([sequence], [length], inputs.between(begin, begin + length)))
            begin += length
        outputs = [torch.cat(of_layer) for of_layer in zip(*parts, strict=True)]
        for layer in given_layers(self.layout):
            seen = [
                attend(q.double(), *self.given[sequence][layer], softcap=SOFTCAP, causal=False)
                for sequence, q in zip(sequences, inputs.layers[layer][0].split(lengths), strict=True)
            ]
            outputs[layer] = torch.cat(seen)
        return outputs

    def _stored(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k, v, scales = k.double(), v.double(), self.layout.scales
        return (k, v) if scales is None else (round_by(k, scales.k[layer]), round_by(v, scales.v[layer]))


def draw_encoder(layout: KVLayout, count: int, seed: int) -> dict[int, tuple[Tensor, Tensor]]:
    """K and V of `count` positions in each layer that keeps an encoder's."""
    generator, groups = torch.Generator().manual_seed(seed), groups_by_layer(layout)
    shapes = {layer: (count, groups[layer].num_kv_heads, HEAD_DIM) for layer in given_layers(layout)}
    return {layer: tuple(torch.randn(shape, generator=generator) for _ in "kv") for layer, shape in shapes.items()}  # type: ignore[misc]


def encode(cache: TvmCache, sequences: list[int], seeds: list[int], *, push: bool = True) -> list[dict]:
    """Stores each sequence's encoder entries, which follow from its seed, and returns them."""
    layout = cache.layout
    drawn = [draw_encoder(layout, cache.border(one), seed) for one, seed in zip(sequences, seeds, strict=True)]
    with torch.inference_mode():
        forward = cache.encode(sequences, push=push)
        for layer in given_layers(layout):
            k, v = (torch.cat([one[layer][index] for one in drawn]) for index in range(2))
            forward.attention.store_given(layer, k, v)
        cache.commit(forward)
    return drawn


def run(
    cache: TvmCache, sequences: list[int], lengths: list[int], inputs: Inputs, *, push: bool = True
) -> list[Tensor]:
    given = set(given_layers(cache.layout))
    with torch.inference_mode():
        plan = cache.begin_forward(sequences, lengths, push=push)
        outputs = [
            cache.read(plan, layer, q) if layer in given else cache.attention(plan, layer, q, k, v)
            for layer, (q, k, v) in enumerate(inputs.layers)
        ]
        cache.end_forward(plan)
    return outputs


def compare(cache: TvmCache, naive: NaiveEncoders, sequences: list[int], lengths: list[int], seed: int) -> None:
    inputs = draw_inputs(cache.layout, sum(lengths), seed)
    pairs = zip(run(cache, sequences, lengths, inputs), naive.run(sequences, lengths, inputs), strict=True)
    for o, expected in pairs:
        assert_close(o, expected)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("kernels", KERNELS)
def test_every_query_sees_all_of_its_encoder_and_its_own_sequence_by_its_span(
    layout: KVLayout, kernels: KernelFactory
) -> None:
    """Encoders of unlike lengths, prompts in chunks, and decodes beside them."""
    cache, naive = encoder_cache(layout, kernels), NaiveEncoders(layout)
    lengths = {1: 5, 2: 8, 3: 1}
    for sequence, length in lengths.items():
        cache.add_sequence(sequence, length)
    drawn = encode(cache, [1, 2, 3], [1, 2, 3])
    for (sequence, length), one in zip(lengths.items(), drawn, strict=True):
        naive.encode(sequence, length, one)
    for seed, (sequences, counts) in enumerate(BATCHES):
        compare(cache, naive, sequences, counts, seed)


@pytest.mark.parametrize("layout", [LAYOUT, PLAIN])
def test_programs_of_forks_pops_prefixes_and_reservations_give_what_a_naive_cache_gives(layout: KVLayout) -> None:
    random = Random(7)
    cache, naive = encoder_cache(layout, num_pages=80), NaiveEncoders(layout)
    tokens: dict[int, list[int]] = {}
    hits = 0
    for step in range(400):
        live, action = sorted(tokens), random.random()
        if not live or (action < 0.2 and len(live) < 5):
            sequence, kind = next(number for number in range(20) if number not in tokens), random.randrange(4)
            length = 3 + 2 * kind
            border = -(-length // SIZE) * SIZE
            prompt = [100 + kind] * border + [random.randrange(2) for _ in range(9)]
            cache.add_sequence(sequence, length)
            matched = cache.match_prefix(sequence, prompt)
            cache.reserve(sequence, border + 9 + random.randrange(8), 9)
            assert matched == 0 or matched >= border
            stored = draw_encoder(layout, border, kind)
            if not matched:
                encode(cache, [sequence], [kind])
            naive.encode(sequence, length, stored)
            hits += matched > border
            whole = draw_prompt(layout, prompt[border:])
            naive.run([sequence], [matched - border], whole.between(0, matched - border)) if matched > border else None
            rest = whole.between(max(matched - border, 0), 9)
            count = 9 - max(matched - border, 0)
            found, expected = run(cache, [sequence], [count], rest), naive.run([sequence], [count], rest)
            for o, wanted in zip(found, expected, strict=True):
                assert_close(o, wanted)
            cache.publish_prefix(sequence, prompt)
            tokens[sequence] = prompt
        elif action < 0.3 and len(live) < 5:
            parent, child = random.choice(live), next(number for number in range(20) if number not in tokens)
            cache.fork_sequence(parent, child)
            naive.fork(parent, child, naive.length(parent))
            tokens[child] = tokens[parent]
        elif action < 0.4:
            sequence = random.choice(live)
            if naive.length(sequence) > naive.borders[sequence]:
                cache.pop(sequence, 1)
                naive.pop(sequence, 1)
                compare(cache, naive, [sequence], [1], step)
        elif action < 0.55:
            sequence = random.choice(live)
            cache.remove_sequence(sequence)
            del tokens[sequence]
        else:
            rows = [
                one for one in random.sample(live, random.randint(1, len(live))) if naive.length(one) < MAX_LENGTH - 4
            ]
            if rows:
                compare(cache, naive, rows, [random.randint(1, 3) if random.random() < 0.3 else 1 for _ in rows], step)
    assert hits > 5
    cache.clear()
    assert cache.pages.free == 80


def draw_prompt(layout: KVLayout, prompt: list[int]) -> Inputs:
    """Draws each token's inputs from the token and its predecessors, so that equal prefixes have equal K and V."""
    parts = [draw_inputs(layout, 1, hash(tuple(prompt[: index + 1])) % 1_000_003) for index in range(len(prompt))]
    layers = zip(*(part.layers for part in parts), strict=True)
    return Inputs([tuple(torch.cat(tensors) for tensors in zip(*layer, strict=True)) for layer in layers])  # type: ignore[misc]


def test_a_group_holds_no_page_on_the_others_side_of_the_border() -> None:
    cache = encoder_cache(PLAIN, num_pages=8)
    assert cache.room(22, None, 9).needed == (3, 3)  # positions 0 … 11 are the encoder's
    cache.add_sequence(1, 9)
    cache.reserve(1, 22)
    assert cache.pages.free == 5
    encode(cache, [1], [0])
    run(cache, [1], [10], draw_inputs(PLAIN, 10, 0))
    assert (cache.pages.free, cache.num_tokens(1), cache.border(1)) == (5, 22, 12)
    with pytest.raises(InvalidArgument, match="end is 13; group 1 has the encoder's 12 positions"):
        cache.gather_group(1, 1, 0, 13)
    with pytest.raises(InvalidArgument, match="begin is 11; positions before 12"):
        cache.gather_group(1, 0, 11, 13)


def test_forks_share_the_encoders_pages() -> None:
    cache = encoder_cache(PLAIN, num_pages=8)
    cache.add_sequence(1, 16)
    encode(cache, [1], [0])
    run(cache, [1], [4], draw_inputs(PLAIN, 4, 0))
    for child in (2, 3, 4):
        cache.fork_sequence(1, child)
        run(cache, [child], [1], draw_inputs(PLAIN, 1, child))
    assert cache.pages.free == 4  # 4 of the encoder, shared; of the other group 1 shared and 3
    with pytest.raises(InvalidArgument, match=r"position is 12; it must be -1 \(all 20\) or from 16 to 20"):
        cache.fork_sequence(1, 5, 12)
    with pytest.raises(InvalidArgument, match="an encoder's come whole: it must have at least 16"):
        cache.pop(1, 5)


def test_prefixes_are_found_behind_the_same_whole_encoder_prompt_only() -> None:
    cache = encoder_cache(PLAIN)
    prompt = [7] * 8 + [1, 2, 3, 4, 5]
    cache.add_sequence(1, 7)
    encode(cache, [1], [0])
    run(cache, [1], [5], draw_inputs(PLAIN, 5, 0))
    cache.publish_prefix(1, prompt)
    cases = {"same": (7, prompt, 12), "decoder": (7, [*prompt[:8], 9, 9], 8), "length": (8, prompt, 0)}
    cases["late"] = (7, [*prompt[:6], 8, 7, *prompt[8:]], 0)
    for sequence, (encoder_len, tokens, expected) in enumerate(cases.values(), 2):
        cache.add_sequence(sequence, encoder_len)
        assert cache.match_prefix(sequence, tokens) == expected
    cache.add_sequence(9, 7)
    assert cache.match_prefix(9, prompt, b"other") == 0


@pytest.mark.parametrize("push", [True, False])
@pytest.mark.parametrize("held", [0, 8, 12])
def test_a_receiver_gets_each_position_in_the_groups_that_keep_it(push: bool, held: int) -> None:
    """held: positions that the receiver has as a prefix. push: token by token; else page to page."""
    pools = [pools_of(LAYOUT, 24) for _ in range(2)]
    caches = sender, receiver = [sending_cache(LAYOUT, pe, pools) for pe in range(2)]
    prompt = [7] * 8 + [1, 2, 3, 4, 5, 6, 7]
    inputs = draw_inputs(LAYOUT, 7, 3)
    if held:
        receiver.add_sequence(1, 6)
        encode(receiver, [1], [5])
        run(receiver, [1], [7], inputs)
        receiver.publish_prefix(1, prompt[: held + 1])
    for cache in caches:
        cache.add_sequence(2, 6)
    assert receiver.match_prefix(2, prompt) == held
    receiver.reserve(2, 30)
    position_map = receiver.prepare_receive(2, 15 - held)
    sender.mark_send(2, held, position_map, 1)
    encode(sender, [2], [5], push=push)
    run(sender, [2], [7], inputs, push=push)
    sender.send_cached(2) if not push else None
    assert sender.sends_done(2)
    receiver.finish_receive(2)
    assert digest_kv(sender, 2, held, 15) == digest_kv(receiver, 2, held, 15)
    more = draw_inputs(LAYOUT, 1, 9)
    for o, expected in zip(run(receiver, [2], [1], more), run(sender, [2], [1], more), strict=True):
        assert torch.equal(o, expected)
    counts = sender.bytes_sent(2)
    sizes = [LAYOUT.page_bytes(group) // SIZE for group in range(3)]
    seen = (8 + 7 - 8) if held < 8 else 15 - held
    kept = 7 if held <= 8 else 15 - held
    assert counts == max(8 - held, 0) * sizes[2] + kept * sizes[1] + min(kept, seen) * sizes[0]


def test_cached_encoder_entries_go_with_the_forward_behind_them() -> None:
    pools = [pools_of(PLAIN, 24) for _ in range(2)]
    sender, receiver = (sending_cache(PLAIN, pe, pools) for pe in range(2))
    for cache in (sender, receiver):
        cache.add_sequence(1, 6)
    encode(sender, [1], [5])
    sender.mark_send(1, 0, receiver.prepare_receive(1, 9), 1)
    run(sender, [1], [1], draw_inputs(PLAIN, 1, 0))
    receiver.finish_receive(1)
    assert digest_kv(sender, 1, 0, 9) == digest_kv(receiver, 1, 0, 9)


def test_calls_out_of_turn_are_refused() -> None:
    cache, plain = encoder_cache(PLAIN), cache_of(replace(PLAIN, groups=(LayerGroup((0,), KV(1, HEAD_DIM)),)))
    with pytest.raises(InvalidArgument, match="encoder_len is 3; the layout has no encoder, so it must be 0"):
        plain.add_sequence(1, 3)
    with pytest.raises(
        InvalidArgument, match="encoder_len is 0; the layout has an encoder, so it must be from 1 to 64"
    ):
        cache.add_sequence(1)
    cache.add_sequence(1, 6)
    with pytest.raises(InvalidArgument, match=r"sequence 1 lacks its encoder\'s positions; encode\(\) comes first"):
        cache.begin_forward([1], [1])
    with pytest.raises(
        InvalidArgument, match="length is 7; an encoder's positions come whole, so it must be at least 8"
    ):
        cache.prepare_receive(1, 7)
    with pytest.raises(InvalidArgument, match="only sequences of one that has are encoded"):
        plain.encode([1])
    forward = cache.encode([1])
    q, k = torch.zeros(8, QUERY_HEADS, HEAD_DIM), torch.zeros(8, 2, HEAD_DIM)
    with pytest.raises(InvalidArgument, match=r"begin\(\) makes forwards that attend"):
        cache.attention(forward, 0, q, k[:, :1], k[:, :1])
    with pytest.raises(InvalidArgument, match="a batch with encodes makes a forward that stores"):
        forward.attention.store_given(0, k[:, :1], k[:, :1])
    with pytest.raises(InvalidArgument, match=r"layers \[1\] of the plan never ran"):
        cache.commit(forward)
    forward.attention.store_given(1, k, k)
    cache.commit(forward)
    with pytest.raises(InvalidArgument, match="sequence 1 has 8 positions, and an encoder of 8"):
        cache.encode([1])
    with pytest.raises(InvalidArgument, match="groups with an encoder's entries; sequences slide only"):
        cache.enable_sliding_window(1, 8, 2)
    with pytest.raises(InvalidArgument, match=r"layers \[0\] keep an encoder's entries; the first group"):
        KVLayout((LayerGroup((0,), GivenKV(1, HEAD_DIM)), LayerGroup((1,), KV(1, HEAD_DIM, ALL))), SIZE, torch.float32)
    with pytest.raises(
        InvalidArgument, match="layer 2 would read layer 1; it must be an earlier layer that stores K and V"
    ):
        replace(PLAIN, readers=((2, 1),))
    beside = LayerGroup((0,), Beside(1, HEAD_DIM, Every(4)))
    with pytest.raises(InvalidArgument, match=r"layers \[1\] keep an encoder's entries, but groups \[2\] stand beside"):
        KVLayout(
            (LayerGroup((0,), KV(1, HEAD_DIM)), LayerGroup((1,), GivenKV(1, HEAD_DIM)), beside), SIZE, torch.float32
        )


def test_an_encoders_positions_are_not_taken_back() -> None:
    cache = encoder_cache(PLAIN)
    cache.add_sequence(1, 6)
    cache.reserve(1, 24)
    encode(cache, [1], [0])
    for take_back in (lambda: cache.pop(1, 3), lambda: cache.pop_each([1], [3])):
        with pytest.raises(
            InvalidArgument, match="would have 5 positions; an encoder's come whole: it must have at least 8"
        ):
            take_back()
    assert cache.num_tokens(1) == 8
