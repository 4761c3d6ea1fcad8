"""Forwards of prompts, chunk by chunk, and how the KV that they compute goes to its receivers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem.cache.plan.arrays import Int32Array, Int64Array
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.step import Step
from tandem.workers.prefill.push_meter import PushMeter
from tandem.workers.requests.post import Post
from tandem.workers.requests.prompt import Prompt
from tandem.workers.runner.encoder_prompts import PromptChunks
from tandem.workers.sampling.pending_samples import PendingSamples
from tandem.workers.sampling.pooling import Pooled, Reading
from tandem.workers.sampling.prompt_logits import PromptLogits
from tandem.workers.sampling.prompt_logprobs import Scored
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.scheduling.batch import Chunk

PromptForward = Callable[[PromptChunks], PromptLogits]
"""Computes chunks without a push. Returns the logits of chunks that end their prompts."""


@dataclass(frozen=True, eq=False)
class EndedPrompts:
    """Prompts that came to their end in one forward, and their logits.

    sent: prompts of that forward with a receiver; their bytes are counted since the meter said `seconds`. pushes:
    sequences that are sent once the first tokens are sampled.
    """

    prompts: Sequence[Prompt]
    logits: PromptLogits
    sent: Sequence[Prompt]
    pushes: Sequence[int]
    seconds: float


@dataclass(frozen=True, eq=False)
class Sampling:
    """First tokens that are sampled after a forward, one for each of its prompts that ended there."""

    prompts: Sequence[Prompt]
    pending: PendingSamples

    @property
    def is_done(self) -> bool:
        """Whether the tokens are there. What the device reports is raised where they are taken."""
        try:
            return self.pending.is_done()
        except Exception:
            return True


class PromptForwards:
    """Chooses how the KV of each forward is sent. Used by the owner of the cache.

    - Requests that share a forward send each token as it is appended.
    - A request that is alone goes page to page, each chunk after its forward and during the next. Stores to a peer
      slow a forward more than copies do.
    - Requests that share a CUDA graph, or a forward with decode rows, go page to page, too: it stores to no peer.

    A prompt that this worker decodes itself stays where it is.

    Where the transport can, the last chunk goes while it is computed, layers as they are stored. It is sent after
    sampling, because a head computes its part only then (decision 0137).
    """

    def __init__(self, engine: Engine, meter: PushMeter) -> None:
        self._engine = engine
        self._meter = meter
        self.computed_tokens = 0  # so far

    def launch(
        self, chunks: Sequence[Chunk], *, alone: bool, forward: PromptForward | None = None
    ) -> EndedPrompts | None:
        """Computes, or at least launches, one chunk of each prompt. If no prompt ends, sends the chunks that have a
        receiver; else sample() comes next. alone: no other prompt runs or waits. forward: a decode step's forward,
        which takes the chunks, too; None: a forward of their own."""
        prompts = [prompt for prompt, _ in chunks]
        sent = [prompt for prompt in prompts if prompt.target is not None]
        num_tokens = sum(length for _, length in chunks)
        by_pages = alone or forward is not None or self._engine.takes(len(chunks), num_tokens)
        begun = [prompt for prompt in sent if prompt.computed and not prompt.marked]
        for prompt in sent:
            self._mark(prompt)
        for prompt in begun if by_pages else ():
            self._send(prompt)  # what was computed before its receiver was known
        seconds_before = self._meter.seconds
        packed = _packed(chunks)
        if forward is None or any(prompt.gatherer for prompt in prompts):  # which have a forward of their own
            logits = self._compute(chunks, packed, push=bool(sent) and not by_pages)
        else:
            logits = forward(packed)
        self.computed_tokens += num_tokens
        for prompt, length in chunks:
            prompt.computed += length
        if ended := [prompt for prompt in prompts if prompt.computed == prompt.num_tokens]:
            pushes = [prompt.sequence_id for prompt in sent] if by_pages else []
            return EndedPrompts(ended, logits, sent, pushes, seconds_before)
        self._count_pushed(sent, self._meter.seconds - seconds_before)
        for prompt in sent if by_pages else ():
            self._send(prompt)
        return None

    def read_out(self, chunks: Sequence[Chunk]) -> tuple[Pooled, list[Reading | None]]:
        """Computes one chunk of each prompt, for what its reader wants of that."""
        readings = [prompt.reader.reading(prompt.computed, length) for prompt, length in chunks if prompt.reader]
        pooled = self._engine.read_out(_packed(chunks), readings)
        self.computed_tokens += sum(length for _, length in chunks)
        for prompt, length in chunks:
            prompt.computed += length
        return pooled, readings

    def publish(self, chunks: Sequence[Chunk]) -> None:
        """Publishes the computed part of unfinished prompts whose next chunk drops pages from a window, or takes
        pages."""
        if self._engine.layout.drops_past or self._engine.layout.recurs:
            for prompt in (prompt for prompt, _ in chunks if prompt.computed < prompt.num_tokens):
                self._engine.publish(prompt.sequence_id, prompt.token_ids[: prompt.computed], prompt.spec.salt)

    def sample(
        self,
        ended: EndedPrompts,
        sampling: SampleBatch,
        positions: Int64Array,
        posts: Sequence[Post],
        masks: Int32Array | None = None,
    ) -> PendingSamples:
        """Samples first tokens, see Engine.sample. Sends what launch() has left."""
        pending = self._engine.sample(ended.logits, sampling, positions, ended.pushes, posts, masks)
        self._count_pushed(ended.sent, self._meter.seconds - ended.seconds)
        return pending

    def _compute(self, chunks: Sequence[Chunk], packed: PromptChunks, *, push: bool) -> PromptLogits:
        gatherers = [prompt.gatherer for prompt, _ in chunks if prompt.gatherer is not None]
        scored = [_scored(*chunk) for chunk in chunks] if gatherers else ()
        launched = self._engine.launch(Step(chunks=packed, scored=scored, push=push))
        for gatherer, logprobs in zip(gatherers, launched.scored, strict=True):
            gatherer.add(logprobs)
        assert launched.prompts is not None, "the step had chunks"
        return launched.prompts

    def launched(self, prompt: Prompt) -> EndedPrompts:
        """A prompt that was launched as a whole before its receiver was known."""
        assert prompt.logits is not None, "its last chunk was launched"
        self._mark(prompt)
        return EndedPrompts([prompt], prompt.logits, [prompt], [prompt.sequence_id], self._meter.seconds)

    def _mark(self, prompt: Prompt) -> None:
        if prompt.target is not None and not prompt.marked:
            self._engine.mark_send(prompt.sequence_id, *prompt.target)
            prompt.marked = True

    def _send(self, prompt: Prompt) -> None:
        """Pushes what is launched and not sent."""
        seconds_before = self._meter.seconds
        self._engine.push(prompt.sequence_id)
        self._count_pushed([prompt], self._meter.seconds - seconds_before)

    def _count_pushed(self, prompts: Sequence[Prompt], seconds: float) -> None:
        """Divides the seconds of calls that wrote for them, by the bytes that were sent since."""
        sent = [self._engine.sequence(prompt.sequence_id).bytes_sent for prompt in prompts]
        pushed = sum(sent) - sum(prompt.bytes_pushed for prompt in prompts)
        for prompt, total in zip(prompts, sent, strict=True):
            if pushed:
                prompt.push_seconds += seconds * (total - prompt.bytes_pushed) / pushed
            prompt.bytes_pushed = total


def _packed(chunks: Sequence[Chunk]) -> PromptChunks:
    return PromptChunks(
        [prompt.sequence_id for prompt, _ in chunks],
        [prompt.token_ids[prompt.computed : prompt.computed + length] for prompt, length in chunks],
        [prompt.num_tokens for prompt, _ in chunks],
    )


def _scored(prompt: Prompt, length: int) -> Scored | None:
    """Returns the targets that a chunk of so many tokens predicts of its prompt."""
    if prompt.gatherer is None:
        return None
    targets = prompt.token_ids[prompt.computed + 1 : prompt.computed + 1 + length]
    return Scored(targets, prompt.gatherer.num_top)
