"""What a worker says of its GPU before its island agrees on a number of pages."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GpuRoom:
    """num_pages that the GPU has room for beside what is in use. gpu: which it is, unlike that of any other."""

    gpu: str
    num_pages: int
