"""Which GPUs a worker's process sees: its own first, as if it were the only one, then the others of its host.

A driver that does not see a peer's GPU takes the peer's memory, mapped here, for memory of the own GPU, and copies to
it by multiprocessors, for which a forward waits as long (docs/decisions/0005); else by copy engines, beside it.
"""

MOST_GPUS = 64
VARIABLE = "CUDA_VISIBLE_DEVICES"


def with_peers(visible: str) -> str:
    """A value of VARIABLE that names one GPU by its number, with the others behind it: CUDA ends the list at the first
    number that no GPU has. A value of another kind is returned as it is."""
    if not visible.isdecimal():
        return visible
    return ",".join([visible, *(str(other) for other in range(MOST_GPUS) if other != int(visible))])
