"""The GPUs that a worker's process sees: its own first, then the others of its host.

A driver that sees a peer's GPU copies to its memory by copy engines, beside a forward. A driver that does not see it
copies by multiprocessors, and the forward waits (docs/decisions/0005).
"""

MOST_GPUS = 64
VARIABLE = "CUDA_VISIBLE_DEVICES"


def with_peers(visible: str) -> str:
    """A value of VARIABLE that is one GPU's number, followed by all others. Other values are returned as they are.

    CUDA ends the list at the first number that no GPU has.
    """
    if not visible.isdecimal():
        return visible
    return ",".join([visible, *(str(other) for other in range(MOST_GPUS) if other != int(visible))])
