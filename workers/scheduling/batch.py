"""The work of one step, as frozen values. They are NamedTuples: frozen dataclasses take a microsecond longer."""

from typing import NamedTuple

from tandem.cache.plan.arrays import Int64Array
from tandem.workers.requests.prompt import Prompt
from tandem.workers.sampling.sample_batch import SampleBatch


class DecodeStep(NamedTuple):
    """One new token for each of n sequences. Arrays are int64 [n]."""

    sequence_ids: tuple[int, ...]
    tokens: Int64Array  # the input of each row whose source is ON_HOST
    sources: Int64Array  # the row of the last launched step that samples the input, or ON_HOST
    sampling: SampleBatch
    positions: Int64Array  # the index of each sampled token in its sequence


class Chunk(NamedTuple):
    """The next tokens of one prompt."""

    request: Prompt
    length: int


class StepBatch(NamedTuple):
    """Prompt chunks and decode rows of one step."""

    chunks: tuple[Chunk, ...] = ()
    launched: tuple[Prompt, ...] = ()  # computed speculatively as a whole: only to be sent
    alone: bool = False  # whether no other prompt than the chunk's runs or waits
    decodes: DecodeStep | None = None

    def parted(self) -> "tuple[StepBatch, tuple[Chunk, ...]]":
        """Returns the batch without the chunks of prompts that nobody decodes, and these chunks."""
        read = tuple(chunk for chunk in self.chunks if chunk.request.reader is not None)
        return (self._replace(chunks=tuple(one for one in self.chunks if one not in read)) if read else self), read

    @property
    def prompt_tokens(self) -> int:
        """The new tokens of prompts."""
        return sum(chunk.length for chunk in self.chunks)

    @property
    def ends_prompt(self) -> bool:
        """Whether a chunk is the last one of its prompt. Before the batch is computed."""
        return any(chunk.request.computed + chunk.length == chunk.request.num_tokens for chunk in self.chunks)

    @property
    def num_tokens(self) -> int:
        """The new tokens that the step stores."""
        rows = 0 if self.decodes is None else len(self.decodes.sequence_ids)
        return rows + self.prompt_tokens
