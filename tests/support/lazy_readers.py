"""Gateways that start what reads long requests when the first one comes, and not as they start themselves.

That imports for a second, in each gateway process that a test starts or starts again.
"""

from tandem.cluster.gateway import Gateway


def make_lazy() -> None:
    """All gateways of this process, and of those that are forked from it."""
    Gateway.prepare = lambda self: None  # type: ignore[method-assign]
