"""Stores a world as bytes, to come back to it and to recognize it."""

import copyreg
import io
import pickle
import sys
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.cache.attention.page_look_up import PageLookUp
from tandem.cache.pages.allocator import PageAllocator
from tandem.cache.pages.step_growth import StepGrowth
from tandem.cache.plan.layout import KVLayout
from tandem.workers.counters import Counters
from tandem.workers.engine.launches import Launches
from tandem.workers.requests.decode_request import LocalPrompt
from tandem.workers.requests.prefill_request import PrefillRequest, PrefillResult, SpeculativePrompt
from tandem.workers.requests.prompt import Prompt
from tandem.workers.sampling.prompt_logits import PromptLogits
from tandem.workers.scheduling.step_meter import StepMeter
from tandem.workers.scheduling.token_pace import TokenPace
from tandem.workers.wire.prompt_spec import EncoderPrompt, PromptSpec
from tests.protocol.small_island import LAYOUT
from tests.protocol.world import World

TIMES: dict[str, float] = dict.fromkeys(("arrived", "started", "sampled_at", "push_seconds"), 0.0)


def save(world: World) -> bytes:
    """Serializes a world. Equal bytes mean equal worlds, except for measured times and counters, which decide
    nothing."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=5)
    pickler.dispatch_table = _REDUCERS
    pickler.dump(world)
    return buffer.getvalue()


def load(snapshot: bytes) -> World:
    return pickle.loads(snapshot)


def _layout() -> KVLayout:
    return LAYOUT


def _future(result: object, error: BaseException | None, done: bool) -> "Future[object]":
    future: Future[object] = Future()
    if error is not None:
        future.set_exception(error)
    elif done:
        future.set_result(result)
    return future


def _reduce_future(future: "Future[object]") -> tuple[Any, ...]:
    done = future.done()
    error = future.exception() if done else None
    return _future, (future.result() if done and error is None else None, error, done)


def _reduce_result(result: PrefillResult) -> tuple[Any, ...]:
    return PrefillResult, (result.first_token, None, result.cached_tokens, 0.0, 0.0, 0.0, 0)


def _reduce_timed(timed: Prompt | SpeculativePrompt) -> tuple[Any, ...]:
    state = {field.name: TIMES.get(field.name, getattr(timed, field.name)) for field in fields(timed)}
    return copyreg.__newobj__, (type(timed),), state  # type: ignore[attr-defined]


def _spec(
    token_ids: np.ndarray, salt: bytes, length: int, border: int, whole: bool, num_output: int, priority: int
) -> PromptSpec:
    return PromptSpec(token_ids, salt, EncoderPrompt(length, border), None, whole, num_output, priority)


def _reduce_spec(spec: PromptSpec) -> tuple[Any, ...]:
    assert spec.sliding is None
    return _spec, (spec.token_ids, spec.salt, *spec.encoder, spec.whole, spec.num_output, spec.priority)


def _reduce_array(array: np.ndarray) -> tuple[Any, ...]:
    return np.ndarray, (array.shape, array.dtype.char, bytearray(array.tobytes()))


def _zeros(shape: tuple[int, ...]) -> Tensor:
    return torch.zeros(shape)


def _reduce_pool(pool: Tensor) -> tuple[Any, ...]:
    assert not pool.any()  # nothing stands in pools here, for tokens are kept in a TokenMemory
    return _zeros, (tuple(pool.shape),)


def _allocator(state: dict[str, Any]) -> PageAllocator:
    allocator = PageAllocator.__new__(PageAllocator)
    vars(allocator).update({sys.intern(name): value for name, value in state.items()})  # as pickle does: equal bytes
    allocator._free = allocator._edged[1:-1]  # the same memory, which arrays do not keep in bytes
    return allocator


def _reduce_allocator(allocator: PageAllocator) -> tuple[Any, ...]:
    return _allocator, ({name: value for name, value in vars(allocator).items() if name != "_free"},)


def _reduce_look_up(look_up: PageLookUp) -> tuple[Any, ...]:
    return PageLookUp, (look_up._table,)


def _reduce_growth(growth: StepGrowth) -> tuple[Any, ...]:
    return StepGrowth.load, growth._given


def _reduce_launches(launches: Launches) -> tuple[Any, ...]:
    return Launches, (launches._runner,)


def _logits(on_device: Tensor) -> PromptLogits:
    return PromptLogits(0, on_device)


_REDUCERS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    Counters: lambda _: (Counters, ()),
    KVLayout: lambda _: (_layout, ()),
    Future: _reduce_future,
    PromptSpec: _reduce_spec,
    PageAllocator: _reduce_allocator,
    Launches: _reduce_launches,
    PromptLogits: lambda logits: (_logits, (logits.on_device,)),
    PageLookUp: _reduce_look_up,
    StepGrowth: _reduce_growth,
    np.ndarray: _reduce_array,
    Tensor: _reduce_pool,
    PrefillRequest: _reduce_timed,
    LocalPrompt: _reduce_timed,
    StepMeter: lambda _: (StepMeter, ()),
    TokenPace: lambda _: (TokenPace, (None, 1)),
    SpeculativePrompt: _reduce_timed,
    PrefillResult: _reduce_result,
}
