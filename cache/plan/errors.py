"""The errors of the cache. Each names the argument, the value received and what it must be."""


class CacheError(Exception):
    """Base of all errors of tandem.cache."""


class InvalidArgument(CacheError, ValueError):
    """A value outside what the contract accepts; nothing was changed."""


class OutOfPages(CacheError):
    """The pool has too few free pages for the call; nothing was changed."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{needed} pages needed, {free} free")
        self.needed = needed
        self.free = free


class OutOfSequences(CacheError):
    """The cache already has as many sequences as it was made for; nothing was changed."""


class DriverRefused(CacheError):
    """The GPU's driver is missing, too old, or did not take a call."""
