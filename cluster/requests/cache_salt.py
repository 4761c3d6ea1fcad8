"""Separates cached prefixes: only requests with equal salts share them."""

from hashlib import blake2b

from tandem.cache.plan.prefix_chain import MAX_SALT_BYTES
from tandem.cluster.errors import InvalidRequest

MAX_CACHE_SALT = 256  # characters


def worker_salt(cache_salt: str, credential: str) -> bytes:
    """Returns the salt that workers get: 16 bytes that cannot be inverted, or none if both arguments are empty.

    cache_salt: the request's own. credential: what its caller showed to be let in, if that counts. Every gateway makes
    the same salt. Raises InvalidRequest.
    """
    if len(cache_salt) > MAX_CACHE_SALT:
        raise InvalidRequest(f"cache_salt has {len(cache_salt)} characters; it may have at most {MAX_CACHE_SALT}")
    if not cache_salt and not credential:
        return b""
    caller = blake2b(credential.encode(), digest_size=32, person=b"credential").digest()  # of one length
    return blake2b(caller + cache_salt.encode(), digest_size=MAX_SALT_BYTES, person=b"cache salt").digest()
