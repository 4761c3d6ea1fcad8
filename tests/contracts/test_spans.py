"""Tests that every transport brings the entries of a sequence that the spans of its layer groups name, and no
others."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tandem.cache.attention.begun_forward import Forward
from tandem.cache.attention.forward import Batch
from tandem.cache.digest import digest_kv
from tandem.cache.kinds.compressed import Beside
from tandem.cache.kinds.given import GivenKV
from tandem.cache.kinds.kv import KV
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.position_map import SKIP, SlotRuns
from tandem.cache.plan.rope import RopeParameters
from tandem.cache.plan.spans import Chunk, Every, Span, Window
from tandem.transfer.membership import TransportConfig
from tandem.transfer.tcp import sending
from tandem.transfer.transport import Transport
from tandem.transfer.wire_map import decode_map, encode_map
from tests.contracts.islands import ISLANDS
from tests.support.kinds import changed, is_beside
from tests.support.tvm_cache import TvmCache

PAGE, HEAD_DIM, LENGTH, ENCODER_LEN = 8, 64, 203, 30
UNWRITTEN = 0x5A  # a byte
PAGES = LENGTH // PAGE + 6
OWN = LayerGroup((0, 1), KV(2, HEAD_DIM))
COMPRESSED = (
    changed(OWN, keeps=Window(21)),
    LayerGroup((0,), Beside(1, HEAD_DIM, Every(4), planes=1)),
    LayerGroup((1,), Beside(1, HEAD_DIM, Every(32), planes=1)),
    LayerGroup((0,), Beside(1, 2 * HEAD_DIM, Window(8), planes=1, dtype=torch.float32)),
    LayerGroup((1,), Beside(1, HEAD_DIM, Window(32), dtype=torch.float32)),
)
LAYOUTS = {
    "all": (OWN,),
    "window": (changed(OWN, keeps=Window(21)), replace(OWN, layers=(2,))),
    "chunk": (changed(OWN, keeps=Chunk(40)),),
    "every": (OWN, *COMPRESSED[1:3]),
    "compressed": COMPRESSED,
    "given": (OWN, LayerGroup((2,), GivenKV(2, HEAD_DIM))),
}


@contextmanager
def island_of(name: str, layout: KVLayout) -> Iterator[list[Transport]]:
    """Makes an island of two PEs."""
    config = TransportConfig(0, 2, layout, (PAGES,) * len(layout.groups), num_signals=4, island="spans", epoch=7)
    transports = ISLANDS[name](config)
    try:
        handles = [transport.open() for transport in transports]
        for transport in transports:
            transport.join(handles)
        yield transports
    finally:
        for transport in transports:
            transport.close()


def cache_on(transport: Transport) -> TvmCache:
    layout, rope = transport.layout, RopeParameters("default", HEAD_DIM)
    ropes = [RopeParameters("none", 0) if group.keeps.given else rope for group in layout.groups]
    cache = TvmCache(layout, transport.pools, max_sequences=1, max_sequence_length=LENGTH, rope=ropes, writer=transport)
    cache.add_sequence(0, ENCODER_LEN if layout.has_encoder else 0)
    return cache


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape).to(dtype)


@torch.inference_mode()
def encode(cache: TvmCache) -> None:
    forward = cache.encode([0])
    for layer in cache.layout.groups[1].layers:
        forward.attention.store_given(layer, *(draw(cache.border(0), 2, HEAD_DIM) for _ in "kv"))
    cache.commit(forward)


@torch.inference_mode()
def run(cache: TvmCache, count: int) -> None:
    forward = cache.begin(Batch([0], [count]))
    for number, group in enumerate(cache.layout.groups):
        for layer in group.layers:
            if is_beside(group):
                store(cache, forward, number, layer)
            elif group.keeps.given:
                forward.attention.read(layer, draw(count, 4, HEAD_DIM))
            else:
                q, k, v = (draw(count, heads, HEAD_DIM) for heads in (4, 2, 2))
                forward.attention.attend(layer, q, k, v)
    cache.commit(forward)


def store(cache: TvmCache, forward: Forward, number: int, layer: int) -> None:
    group, count = cache.layout.groups[number], cache.new_entries(forward, number).positions.size
    shape = count, group.num_kv_heads, group.head_dim
    planes = [draw(*shape, dtype=cache.layout.stored_dtype_of(number)) for _ in range(group.planes)]
    cache.store(forward, number, layer, *planes)


def first_needed(span: Span, query: int) -> int:
    """Returns the first position that transformers' masks show to a query."""
    if isinstance(span, Window):
        return max(query - span.size + 1, 0)
    return query // span.size * span.size if isinstance(span, Chunk) else 0


def wanted_entries(layout: KVLayout, number: int, begin: int, end: int, border: int) -> range:
    """Returns the entries of positions begin … end - 1 in pages that a query in the page of `end`, the coarsest,
    needs."""
    group, (every, size, _) = layout.groups[number], layout.paging[number]
    if group.keeps.given:
        return range(min(begin, border), min(end, border))
    first = first_needed(group.keeps, end // layout.grain * layout.grain) // size * size
    return range(max(begin // every, first, border), end // every)


@pytest.mark.parametrize("cached", [False, True], ids=["by tokens", "by pages"])
@pytest.mark.parametrize("begin", [0, 64])
@pytest.mark.parametrize("spans", LAYOUTS)
@pytest.mark.parametrize("name", ISLANDS)
def test_what_lands_is_what_spans_keep(
    name: str, spans: str, begin: int, cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, on_the_wire = KVLayout(LAYOUTS[spans], PAGE, torch.bfloat16), []
    send_parts = sending.send_parts

    def count_bytes(connection: object, parts: list) -> None:
        on_the_wire.append(sum(map(len, parts)))
        send_parts(connection, parts)  # type: ignore[arg-type]

    monkeypatch.setattr(sending, "send_parts", count_bytes)
    torch.manual_seed(0)
    with island_of(name, layout) as island:
        sender, receiver = map(cache_on, island)
        if begin:
            receiver.prepare_receive(0, begin)
            receiver.finish_receive(0)
        for pool in island[1].pools:
            pool.view(torch.uint8).fill_(UNWRITTEN)
        wire = encode_map(receiver.prepare_receive(0, LENGTH - begin), layout)
        border = receiver.border(0)
        pages = tuple(len(pool) for pool in island[1].pools)
        position_map = decode_map(
            wire, layout, num_pages=pages, expected_start=begin, expected_tokens=LENGTH - begin, border=border
        )
        if border:
            if not cached and not begin:
                sender.mark_send(0, 0, position_map, 1)
            encode(sender)
        lengths = range(max(border, begin), LENGTH, 29)
        if begin > border:
            run(sender, begin - border)
        if not cached and not (border and not begin):
            sender.mark_send(0, begin, position_map, 1)
        for at in lengths:
            run(sender, min(29, LENGTH - at))
        if cached:
            sender.mark_send(0, begin, position_map, 1)
            sender.send_cached(0)
        assert sender.sends_done(0)
        island[0].quiet(1)
        receiver.finish_receive(0)

        wanted = [wanted_entries(layout, number, begin, LENGTH, border) for number in range(len(layout.groups))]
        for pool, entries in zip(island[1].pools, wanted, strict=True):
            slots = pool.permute(0, 4, 1, 2, 3, 5).flatten(0, 1)  # [slots, layers, planes, heads, dim]
            landed = (slots.contiguous().view(torch.uint8) != UNWRITTEN).flatten(3).any(-1)
            assert int(landed.sum()) == len(entries) * landed.shape[1] * landed.shape[2]
        algebra = sum(len(entries) * layout.entry_bytes(number) for number, entries in enumerate(wanted))
        assert sender.bytes_sent(0) == algebra
        if name == "tcp":
            assert algebra < sum(on_the_wire) <= algebra * 1.02
        assert digest_kv(receiver, 0, begin, LENGTH) == digest_kv(sender, 0, begin, LENGTH)
        for number, (pool, runs) in enumerate(zip(island[1].pools, position_map.runs, strict=True)):
            check_digest_sees(receiver, begin, number, pool, runs)


def check_digest_sees(cache: TvmCache, begin: int, number: int, pool: Tensor, runs: SlotRuns) -> None:
    """Checks that the digest covers the first and the last wanted slot, and no other slot."""
    wanted = [slot for slot in runs.slots().tolist() if slot != SKIP]
    before, size = digest_kv(cache, 0, begin, LENGTH), cache.layout.paging[number].entries
    other = next(slot for slot in range(len(pool) * size) if slot not in wanted)
    for slot in (*wanted[:1], *wanted[-1:], other):
        entry = pool[slot // size, -1, -1, -1, slot % size].view(torch.uint8)
        entry[5] ^= 16
        assert (digest_kv(cache, 0, begin, LENGTH) == before) == (slot == other)
        entry[5] ^= 16
