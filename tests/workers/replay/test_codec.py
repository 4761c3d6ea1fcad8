"""Values of actions come back from bytes as they were; bytes that no encoder writes are refused."""

import gc
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from tandem.cache.plan.position_map import PositionMap, SlotRuns
from tandem.transfer.completion import Signal
from tandem.transfer.recall import Recall
from tandem.workers.engine.admission import Admission
from tandem.workers.replay.codec import DTYPES, LONG, MOST_NESTED, Decoder, Encoder, Known, Tag
from tandem.workers.replay.errors import BadRecord, NotAValue
from tandem.workers.replay.value_types import value_types
from tandem.workers.sampling.logit_rules import LogitRules
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.sampling.sampling_params import SamplingParams
from tandem.workers.wire.prompt_spec import PromptSpec

ATOMS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**64), 2**64 - 1),
    st.floats(allow_nan=False),
    st.binary(max_size=40),
    st.text(max_size=20),
)
VALUES = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.integers(0, 9), inner, max_size=4),
        st.frozensets(st.integers(0, 99), max_size=4),
        st.lists(st.integers(-(2**63), 2**63 - 1) | st.booleans(), min_size=LONG, max_size=LONG + 2).map(tuple),
    ),
    max_leaves=12,
)


def encoder() -> Encoder:
    return Encoder(value_types(), secrets=True)


def back(value: object) -> Any:
    return Decoder(value_types()).decode(encoder().encode(value, "value"))


@given(VALUES)
def test_values_come_back(value: object) -> None:
    found = back(value)
    assert found == value
    assert type(found) is type(value)


@given(st.sampled_from(DTYPES).flatmap(lambda dtype: arrays(dtype, array_shapes(min_dims=1, max_dims=3, min_side=0))))
def test_arrays_come_back(array: np.ndarray) -> None:
    found = back(array)
    assert found.dtype == array.dtype
    assert np.array_equal(found, array, equal_nan=array.dtype.kind == "f")


def test_types_of_actions_come_back() -> None:
    runs = SlotRuns(np.array([4, -1], np.int32), np.array([2, 1], np.int32))
    assert back(PositionMap(3, (runs,))) == PositionMap(3, (runs,))
    assert back(Recall(1, Signal(2, 3))) == Recall(1, Signal(2, 3))
    asked = back(Admission(PromptSpec(np.arange(9), salt=b"x"), 12, 4, shares=True))
    assert asked.prompt.token_ids.tolist() == list(range(9))
    assert (asked.prompt.salt, asked.num_tokens, asked.slides) == (b"x", 12, False)


def test_rules_are_sent_once_and_stay_the_same_object() -> None:
    writes, reads = encoder(), Decoder(value_types())
    rules = LogitRules(SamplingParams(presence_penalty=1.0), frozenset({7}), np.arange(3), 1, 2)
    batch = SampleBatch.from_params([SamplingParams(temperature=0)] * 2, [rules, None])
    first, second = writes.encode(batch, "batch"), writes.encode(batch, "batch")
    assert len(second) < len(first) - 50
    found, again = reads.decode(first), reads.decode(second)
    assert found.rules[0] is again.rules[0]
    assert found.rules[0].stop_ids == {7}
    del rules, batch
    gc.collect()
    gone = writes.gone()
    assert sorted(gone) == [0, 1]
    reads.forget(gone)
    assert not reads.known


def test_an_object_without_a_value_is_known_by_its_number() -> None:
    class Samples:
        pass

    writes, reads, samples = encoder(), Decoder(value_types()), Samples()
    number = writes.number(samples)
    data = writes.encode((samples,), "result")
    assert reads.decode(data) == (Known(number),)
    reads.known[number] = "samples"
    assert reads.decode(data) == ("samples",)


def test_what_is_no_value_is_named_with_its_field() -> None:
    with pytest.raises(NotAValue, match=r"Admission\.num_tokens is a function"):
        encoder().encode(Admission(PromptSpec(np.arange(2)), lambda: 1, 4, shares=True), "admit")  # type: ignore[arg-type]
    with pytest.raises(NotAValue, match="step is an array of complex128"):
        encoder().encode(np.zeros(2, np.complex128), "step")
    with pytest.raises(NotAValue, match="signal is 1844"):
        encoder().encode(2**64, "signal")

    class Unregistered(NamedTuple):
        one: int

    with pytest.raises(NotAValue, match="step is a Unregistered"):
        encoder().encode(Unregistered(1), "step")


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with suppress(BadRecord):
        Decoder(value_types()).decode(data)


@given(VALUES, st.data())
def test_a_cut_value_is_refused(value: object, data: st.DataObject) -> None:
    written = encoder().encode(value, "value")
    with pytest.raises(BadRecord):
        Decoder(value_types()).decode(written[: data.draw(st.integers(0, len(written) - 1))])


def test_deep_values_are_refused() -> None:
    value: object = ()
    for _ in range(MOST_NESTED + 1):
        value = (value,)
    with pytest.raises(BadRecord, match="nested"):
        back(value)


def test_fields_that_a_type_refuses_are_bad() -> None:
    data = bytearray(encoder().encode(SlotRuns(np.zeros(1, "<i4"), np.ones(1, "<i4")), "runs"))
    runs = data.index(Tag.ARRAY)
    data[runs : runs + 8] = bytes([Tag.NONE])
    with pytest.raises(BadRecord, match="cannot be read"):
        Decoder(value_types()).decode(bytes(data))
