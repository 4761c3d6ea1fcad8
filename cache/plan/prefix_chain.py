"""How full pages of a token sequence are called: the same names on every worker and at the gateway."""

from collections.abc import Iterator
from hashlib import blake2b

from tandem.cache.plan.arrays import Int64Array
from tandem.cache.plan.errors import InvalidArgument

DIGEST_BYTES = 16
KEY_BYTES = 8  # of a digest, where a wrong one costs time but changes no token
MAX_SALT_BYTES = 16


def encoder_salt(encoder_ids: Int64Array, salt: bytes = b"") -> bytes:
    """The salt of a sequence that begins with the encoder's prompt encoder_ids (int64 [n]), within `salt`: each of the
    encoder's entries depends on the whole prompt, so that nothing is shared with another. Raises as digest_chain."""
    _check_salt(salt)
    return blake2b(encoder_ids.tobytes(), digest_size=MAX_SALT_BYTES, key=salt, person=b"encoder").digest()


def adapter_salt(adapter: bytes, salt: bytes = b"") -> bytes:
    """The salt of a sequence that the LoRA adapter of this digest computes, within `salt`: no prefix is shared across
    adapters. An empty digest leaves `salt` as it is. Raises as digest_chain.

    Workers put it in place of the salt of each prompt that comes in. Who names pages from outside does the same.
    """
    _check_salt(salt)
    if not adapter:
        return salt
    return blake2b(adapter, digest_size=MAX_SALT_BYTES, key=salt, person=b"adapter").digest()


def digest_chain(token_ids: Int64Array, page_size: int, num_pages: int, salt: bytes = b"") -> Iterator[bytes]:
    """Digests of the first num_pages full pages of token_ids (int64 [n]), each taken when it is asked for.

    digest_i = blake2b(digest_{i-1} ‖ tokens of page i). The chain begins with a digest of the salt, or with nothing
    where the salt is empty: pages of different salts have different names. A salt is not put there as it is, because
    it could be the digest of a page. InvalidArgument for a salt of more than MAX_SALT_BYTES.
    """
    _check_salt(salt)
    return _chain(token_ids, page_size, num_pages, salt)


def _check_salt(salt: bytes) -> None:
    if len(salt) > MAX_SALT_BYTES:
        raise InvalidArgument(f"salt has {len(salt)} bytes; it may have at most {MAX_SALT_BYTES}")


def _chain(token_ids: Int64Array, page_size: int, num_pages: int, salt: bytes) -> Iterator[bytes]:
    tokens = token_ids[: num_pages * page_size].tobytes()
    stride = 8 * page_size
    digest = blake2b(salt, digest_size=DIGEST_BYTES, person=b"salt").digest() if salt else b""
    for begin in range(0, num_pages * stride, stride):
        digest = blake2b(digest + tokens[begin : begin + stride], digest_size=DIGEST_BYTES).digest()
        yield digest
