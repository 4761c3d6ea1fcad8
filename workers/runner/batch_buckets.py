"""The sizes of forwards that are captured: one runs in the least that holds it, filled up with padding."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tandem.cache.kernels.base import Limits

LEAST_TO_SHARE = 16  # rows; for fewer, sharing takes long prefixes to pay for its launches
STEP = 8  # rows, the least that a tensor core's tile adds
WIDE = 256  # rows; beyond, each graph more costs a start more than padding costs a step
WIDE_STEP = 32
# Of a decode step, and the least and most of the prompt chunks in its forward. Each pair of sizes is a graph.
MIXED_ROWS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
MIXED_TOKENS = (64, 512)
SLIDING_ROWS = (1, 4, 16, 64)  # of a step in which sequences slide; larger ones are eager
MOST_PROMPTS = 16  # sequences of a forward
MOST_PROMPT_TOKENS = 4096  # what a graph holds takes memory
# Tokens times the square of hidden_size: with more, a layer's products take a fast GPU longer, some 0.6 ms, than its
# launches take the host.
LAUNCH_BOUND = 1 << 34


def bucket_sizes(limit: int) -> list[int]:
    """1, 2, 4, 8, 16, 24, … 256, 288, … below `limit`, and `limit` itself, at least 1."""
    small = [size for size in (1, 2, 4) if size < limit]
    return [*small, *range(STEP, min(limit, WIDE), STEP), *range(WIDE, limit, WIDE_STEP), limit]


def sharing_sizes(limit: int) -> list[int]:
    """Sizes for steps whose rows share pages: few, because each needs a graph in addition to the graphs of all
    steps."""
    return [size for size in (16, 32, 64, 128, 256) if size < limit] + [limit] * (limit >= LEAST_TO_SHARE)


def prompt_sizes(limit: int, hidden_size: int) -> list[int]:
    """Tokens: 32 more each up to 256, then a quarter of the power of two below, up to the least that holds `limit`, or
    what is worth a graph; at least 32 and 64."""
    limit = min(limit, MOST_PROMPT_TOKENS, LAUNCH_BOUND // hidden_size**2)
    sizes = [32, 64]
    while sizes[-1] < limit:
        octave = 1 << (sizes[-1].bit_length() - 1)
        sizes.append(sizes[-1] + max(32, octave // 4))
    return sizes


def step_limits(max_sequences: int, num_heads: int, num_inputs: int) -> Iterator[list[Limits]]:
    """Yields the limits of steps: plain ones, those whose rows share prefixes, those with sequences that slide. See
    Limits.of_step."""
    yield [Limits.of_step(size, num_heads, num_inputs) for size in bucket_sizes(max_sequences)]
    yield [Limits.of_step(size, num_heads, num_inputs, sharing=True) for size in sharing_sizes(max_sequences)]
    sliding = [size for size in SLIDING_ROWS if size <= max_sequences]
    yield [Limits.of_step(size, num_heads, num_inputs, sliding=True) for size in sliding]


def verify_sizes(limit: int) -> list[int]:
    """Returns numbers of tokens: 2, 4, 8, 16, … below `limit`, and `limit` itself."""
    return [*(size for size in (2, 4, 8, 16, 32, 64, 128) if size < limit), limit]


def bucket_of(sizes: Sequence[int], rows: int) -> int:
    """The index in ascending `sizes` of the least that is at least `rows`; ValueError when there is none."""
    index = bisect_left(sizes, rows)
    if index == len(sizes):
        raise ValueError(f"rows is {rows}; at most {sizes[-1]} fit")
    return index


class GraphSizes(NamedTuple):
    """Sizes of CUDA graphs in ascending order; of a kind without graphs none, and every size is computed as it is.

    joint: whether rows and chunks can share a forward. rows, chunks: of such a forward, rows and prompt tokens; each
    pair has a graph. prompts: tokens of a forward without rows; longer ones are computed as they are.
    """

    joint: bool = True
    rows: tuple[int, ...] = ()
    chunks: tuple[int, ...] = ()
    prompts: tuple[int, ...] = ()

    def share(self, rows: int) -> bool:
        """Whether so many rows can share a forward with a chunk."""
        return self.joint and (not self.rows or rows <= self.rows[-1])


def filled_up(sizes: Sequence[int], count: int) -> int:
    """The least of ascending `sizes` that is at least `count`; `count` itself when there is none."""
    index = bisect_left(sizes, count)
    return sizes[index] if index < len(sizes) else count
