"""The order of priorities, in which whatever waits rises with time."""


def level(priority: int, waited: float, seconds: float) -> int:
    """The priority that a request counts with after `waited` seconds: one less for each `seconds`. Lower goes first."""
    return priority - int(waited // seconds)
