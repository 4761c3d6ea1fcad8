"""A completion signal: a first token on its way to the peer that decodes its prompt."""

from typing import NamedTuple


class DigestRange(NamedTuple):
    """Stored positions whose digest is sent, too; see digest_kv."""

    sequence: int
    begin: int
    end: int
    sliding: tuple[int, int] | None = None


class Post(NamedTuple):
    """Goes to a row of a PE's mailbox, after all writes to that PE, with the token that is sampled for one row."""

    row: int  # of those sampled
    pe: int
    mailbox_row: int
    signal: int  # see pack_signal
    digest: DigestRange | None = None  # the host waits for the token only where there is one
