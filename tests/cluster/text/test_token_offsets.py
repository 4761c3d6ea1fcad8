"""Bytes of tokens, and where tokens begin in texts, of vocabularies whose tokens may be parts of characters."""

import random

import pytest

from tandem.cluster.text.token_offsets import TokenOffsets
from tandem.cluster.text.tokenizer import Tokenizer
from tests.support.byte_tokenizers import byte_fallback, byte_level

TEXT = "ab 🦢é\N{REPLACEMENT CHARACTER}x"


BOTH = pytest.mark.parametrize("tokenizer", [byte_level(), byte_fallback()], ids=["byte_level", "byte_fallback"])


@BOTH
def test_bytes_of_tokens_make_the_bytes_of_their_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert b"".join(map(tokenizer.token_bytes, ids)) == TEXT.encode()
    (special,) = tokenizer.special_ids
    assert tokenizer.token_bytes(special) == b"<s>"
    assert tokenizer.token_bytes(10_000) == b""


@BOTH
def test_each_byte_is_its_own_token(tokenizer: Tokenizer) -> None:
    own = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
    assert {bytes([byte]) for byte in range(256)} <= set(own)


@BOTH
def test_tokens_of_one_character_begin_with_it(tokenizer: Tokenizer) -> None:
    """A character begins behind the bytes of those before it."""
    ids, text = tokenizer.encode(TEXT), TEXT.encode()
    starts = [len(text[:byte].decode(errors="ignore")) for byte in range(len(text))]
    begins = [sum(len(tokenizer.token_bytes(one)) for one in ids[:count]) for count in range(len(ids))]
    offsets = TokenOffsets(tokenizer)
    assert [offsets.next(token) for token in ids] == [starts[begin] for begin in begins]


def test_whole_tokens_are_where_their_offsets_say_in_any_text() -> None:
    """Also behind bytes that are no text, which become replacement characters; and no offset goes back."""
    chance, tokenizer = random.Random(1), byte_level()
    for _ in range(50):
        ids = [chance.randrange(tokenizer.vocab_size) for _ in range(40)]
        text = tokenizer.decode(ids)
        offsets = TokenOffsets(tokenizer, begin=3, skip_special_tokens=True)
        places = [offsets.next(token) - 3 for token in ids]
        assert places == sorted(places)
        for token, place in zip(ids, places, strict=True):
            own = tokenizer.token_text(token)
            if "\N{REPLACEMENT CHARACTER}" not in own and token not in tokenizer.special_ids:
                assert text.startswith(own, place)


def test_special_tokens_that_a_text_has_not_take_no_room() -> None:
    tokenizer = byte_level()
    (special,) = tokenizer.special_ids
    ids = [special, *tokenizer.encode("ab"), special, *tokenizer.encode("x"), special]
    for text, expected in (("abx", [0, 0, 2, 2, 3]), ("<s>ab<s>x", [0, 3, 5, 8, 9])):
        offsets = TokenOffsets(tokenizer, text=text)
        assert [offsets.next(token) for token in ids] == expected
    silent = TokenOffsets(None, begin=4)
    assert [silent.next(5), silent.next(6)] == [4, 4]
