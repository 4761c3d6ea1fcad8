"""Pseudonyms keep which prompts begin alike, page by page, and nothing else of them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tandem.workers.replay.codec import Encoder
from tandem.workers.replay.pseudonyms import Pseudonyms
from tandem.workers.replay.value_types import value_types
from tandem.workers.runner.encoder_prompts import PromptChunks
from tandem.workers.sampling.logit_rules import LogitRules
from tandem.workers.sampling.sampling_params import SamplingParams
from tandem.workers.wire.prompt_spec import PromptSpec

PAGE, VOCAB = 4, 50_000
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=24)


@given(TOKENS, TOKENS, TOKENS)
def test_prompts_begin_alike_as_far_as_they_did(begin: list[int], one: list[int], other: list[int]) -> None:
    names = Pseudonyms(PAGE, VOCAB)
    first, second = np.array(begin + one, np.int64), np.array(begin + other, np.int64)
    pages = min(first.size, second.size) // PAGE
    for page in range(pages):
        end = (page + 1) * PAGE
        alike = bool((first[:end] == second[:end]).all())
        found = names.tokens(first)[page * PAGE : end], names.tokens(second)[page * PAGE : end]
        assert (found[0] == found[1]).all() == alike


@given(TOKENS)
def test_they_are_token_ids_of_another_key_each_time(tokens: list[int]) -> None:
    array = np.array(tokens, np.int64)
    one, other = Pseudonyms(PAGE, VOCAB).tokens(array), Pseudonyms(PAGE, VOCAB).tokens(array)
    assert one.dtype == np.int64
    assert one.shape == array.shape
    assert not one.size or 0 <= one.min() <= one.max() < VOCAB
    assert array.size < 2 or one.tolist() != other.tolist()


def test_a_salt_stays_apart_from_others_and_from_none() -> None:
    names = Pseudonyms(PAGE, VOCAB)
    assert names.salt(b"") == b""
    assert names.salt(b"one") == names.salt(b"one") != names.salt(b"two")
    assert names.salt(b"one") != b"one"


def test_no_value_that_is_written_has_the_tokens() -> None:
    tokens = np.arange(40_000, 40_016)
    params = SamplingParams(
        stop_token_ids=(40_000, 40_001),
        logit_bias=((40_002, 1.0),),
        bad_words_ids=((40_003, 40_004),),
        stop=("secret",),
    )
    values = [
        PromptSpec(tokens, salt=b"secret"),
        PromptChunks([1], [tokens], [16]),
        LogitRules(params, frozenset({40_005}), tokens, 0, 0),
    ]
    written = b"".join(
        Encoder(value_types(Pseudonyms(PAGE, VOCAB)), secrets=False).encode(one, "value") for one in values
    )
    assert b"secret" not in written
    for token in range(40_000, 40_016):
        assert token.to_bytes(3, "little") not in written
        zigzag = 2 * token
        assert bytes((zigzag & 0x7F | 0x80, zigzag >> 7 & 0x7F | 0x80, zigzag >> 14)) not in written
