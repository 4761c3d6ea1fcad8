"""Salts of prefixes, by which callers share nothing that they should not."""

import pytest

from tandem.cluster.errors import InvalidRequest
from tandem.cluster.requests.cache_salt import MAX_CACHE_SALT, worker_salt


def test_only_callers_of_one_credential_and_one_salt_share() -> None:
    pairs = [("", "ab"), ("a", "b"), ("ab", ""), ("b", "a"), ("", "a"), ("", "b"), ("a", ""), ("b", "")]
    salts = {worker_salt(cache_salt, credential) for cache_salt, credential in pairs}
    assert len(salts) == len(pairs)
    assert {len(salt) for salt in salts} == {16}


def test_every_gateway_makes_the_same_salt() -> None:
    assert worker_salt("tenant", "Bearer one").hex() == worker_salt("tenant", "Bearer one").hex()


def test_without_either_all_share() -> None:
    assert worker_salt("", "") == b""


def test_a_salt_that_is_too_long_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=f"cache_salt has 257 characters; it may have at most {MAX_CACHE_SALT}"):
        worker_salt("s" * 257, "")
