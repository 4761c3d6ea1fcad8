"""The number of prompt tokens in a step with decode rows, so that rows wait no longer than they may."""

from bisect import bisect_right
from collections.abc import Callable, Sequence

from tandem.workers.config import TOKEN_SHARE
from tandem.workers.runner.batch_buckets import GraphSizes, filled_up
from tandem.workers.scheduling.batch import Chunk
from tandem.workers.scheduling.step_time import LEAST_SECONDS, NOTHING, StepLoad, StepTime

LEAST_CHUNK = 64  # tokens; a forward of fewer takes a GPU about as long
TRUSTED = 2  # times the largest chunk that was measured: the model may be wrong about larger ones


class TokenPace:
    """Chooses the largest chunk with which a step keeps the bound, by a model fitted to measured steps. Pure: it
    gets times, and reads no clock. Owned by the step thread."""

    def __init__(
        self, token_seconds: float | None, most: int, share: float = TOKEN_SHARE, sizes: GraphSizes | None = None
    ) -> None:
        """token_seconds: from one token of a row to its next; None sets no bound. most: tokens of a chunk. share: of
        steps with chunks that keep the bound. sizes: of the graphs; None: there are none."""
        self.sizes = sizes or GraphSizes()
        self._bound = token_seconds
        self._most = most
        self._time = StepTime(share)

    def chunk_tokens(self, rows: int, positions: int, context: int = 0, drafted: int = 0) -> int:
        """Most prompt tokens with so many rows, which read so many positions of KV, in the next step. context: of the
        prompt, the tokens before them. drafted: tokens that the step verifies where no forward has rows and chunk."""
        if self._bound is None:
            return self._most
        limit = self._bound / self._time.excess
        least = min(LEAST_CHUNK, self._most)
        most = max(least, min(self._most, TRUSTED * self._time.largest_chunk))
        sizes, chunk, beside = self.sizes, 0, self._time.beside
        if sizes.share(rows):
            candidates = sizes.chunks or range(least, most + 1)
            seconds = beside(filled_up(sizes.rows, rows), positions, context, joint=True)
            chunk = _largest(candidates, most, limit, seconds)
            if not sizes.chunks or chunk < candidates[-1]:
                return max(chunk, least)
        seconds = beside(rows + drafted, positions, context, joint=False)
        apart = _largest(sizes.prompts, most, limit, seconds)
        if not sizes.prompts or apart == sizes.prompts[-1]:
            apart = _largest(range(max(apart, least), most + 1), most, limit, seconds)
        return max(chunk, apart, least)

    def step_load(self, rows: int, positions: int, beside: StepLoad = NOTHING) -> StepLoad:
        """Returns the load of a step of so many rows, with its prompts."""
        if beside.joint:
            rows = filled_up(self.sizes.rows, rows)
        return beside._replace(rows=rows, positions=positions)

    def chunks_load(self, chunks: Sequence[Chunk], *, joint: bool) -> StepLoad:
        """A forward of chunks that are yet to be computed. joint: it is also one of rows."""
        tokens = sum(chunk.length for chunk in chunks)
        if not tokens:
            return NOTHING
        pairs = sum(_pairs(chunk.length, chunk.request.computed) for chunk in chunks)
        return self.forward_load(tokens, joint=joint)._replace(pairs=pairs)

    def forward_load(self, tokens: int, context: int = 0, *, joint: bool) -> StepLoad:
        """Returns the load of a forward of a prompt's next tokens. context: its computed tokens."""
        pairs = _pairs(tokens, context)
        if joint:
            return StepLoad(joint=filled_up(self.sizes.chunks, tokens), pairs=pairs)
        return StepLoad(forwards=1, apart=filled_up(self.sizes.prompts, tokens), pairs=pairs)

    def is_joint(self, rows: int, tokens: int) -> bool:
        """Whether one forward can compute so many rows and prompt tokens."""
        return self.sizes.share(rows) and (not self.sizes.chunks or tokens <= self.sizes.chunks[-1])

    def measured(self, seconds: float, load: StepLoad) -> None:
        """Notes that a step's tokens came `seconds` after the previous step's, and that the device computed `load`
        in between. Now and then it takes 100 µs: call it when the tokens are on their way."""
        self._time.measured(seconds, load)
        self._time.fit()

    def prompt_seconds(self, tokens: int, rows: int = 0, positions: int = 0) -> float:
        """The seconds for so many prompt tokens, with so many rows or alone."""
        if not rows:
            forwards = -(-tokens // self._most)
            return self._time.seconds(StepLoad(forwards=forwards, apart=tokens, pairs=_pairs(tokens, 0)))
        chunk = self.chunk_tokens(rows, positions)
        beside = self.forward_load(chunk, joint=self.is_joint(rows, chunk))
        return tokens / chunk * self._time.seconds(self.step_load(rows, positions, beside))

    def prompt_rate(self, rows: int = 0, positions: int = 0) -> float:
        """Prompt tokens a second with so many rows or alone; 0 before a chunk was measured."""
        if not self._time.largest_chunk:
            return 0.0
        return self._most / max(self.prompt_seconds(self._most, rows, positions), LEAST_SECONDS)


def _pairs(tokens: int, context: int) -> int:
    """Counts the pairs of a token and a position that it attends to, its own or an earlier one."""
    return tokens * context + tokens * (tokens + 1) // 2


def _largest(sizes: Sequence[int], most: int, limit: float, seconds: Callable[[int], float]) -> int:
    """The largest of ascending sizes up to `most` that takes at most `limit`; 0 when none does."""
    index = bisect_right(sizes, limit, hi=bisect_right(sizes, most), key=seconds)
    return sizes[index - 1] if index else 0
