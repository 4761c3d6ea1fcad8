"""How much of a limit is left."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LimitState:
    """One limit of a key. unit: what is counted. reset_seconds: until all of it is left again, if nothing comes."""

    unit: Literal["requests", "tokens"]
    limit: int
    remaining: int
    reset_seconds: float
