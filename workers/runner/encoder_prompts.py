"""Prompt chunks: what an encoder computes before the decoder, what is read besides the logits, and what a head
computes afterwards."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tandem.cache.attention.begun_forward import Forward
from tandem.cache.attention.forward import Batch
from tandem.cache.kernels.upload import upload
from tandem.cache.paged_cache import PagedKVCache
from tandem.cache.plan.arrays import Int64Array
from tandem.workers.models.drafters.load import Model
from tandem.workers.sampling.pooling import Pooled, Reading, pool
from tandem.workers.sampling.prompt_logprobs import PackedLogprobs, Scored, logprobs_of_targets

Adapt = Callable[[Forward], None]
"""Tells the model's layers which LoRA adapters the rows of the next forward have: AdaptedRows.begin."""


class PromptChunks(NamedTuple):
    """The next tokens of some prompts: chunks[i] of prompt sequence_ids[i], whose length is lengths[i].

    A prompt with an encoder begins with the encoder's, padded to whole pages, and its first chunk has all of that.
    """

    sequence_ids: Sequence[int]
    chunks: Sequence[Int64Array]
    lengths: Sequence[int]


class LeftOfPrompts(NamedTuple):
    """A head's part of a forward of prompts, which is computed once their first tokens are sampled. Until then what the
    forward stores is not whole. Its owner may drop it, with the sequences. It holds the features of all tokens.
    """

    cache: PagedKVCache
    forward: Forward
    follow: Callable[[Tensor], None]  # see Decoder.begin_prompts

    @torch.inference_mode()
    def compute(self, first_tokens: Tensor) -> None:
        """Computes the rest. first_tokens: int64 [n or more], of prompts that end."""
        self.follow(first_tokens)
        self.cache.commit(self.forward)


def encoded(model: Model, cache: PagedKVCache, prompts: PromptChunks, *, push: bool) -> PromptChunks:
    """Encodes the parts of an encoder's prompt with which chunks begin. Returns the rest of the chunks. push: see
    encode()."""
    if model.config.encoder is None:
        return prompts
    ids = prompts.sequence_ids
    states = [cache.sequence(one) for one in ids]
    borders = [0 if one.num_tokens else one.border for one in states]
    fresh = [index for index, border in enumerate(borders) if border]
    if fresh:
        firsts = [prompts.chunks[index][: states[index].encoder_len] for index in fresh]
        encode(model, cache, [ids[index] for index in fresh], firsts, push=push)
    rest = zip(*prompts, borders, strict=True)
    left = [(one, chunk[border:], length) for one, chunk, length, border in rest if chunk.size > border]
    return PromptChunks(*zip(*left, strict=True)) if left else PromptChunks((), (), ())


@torch.inference_mode()
def encode(
    model: Model, cache: PagedKVCache, sequence_ids: Sequence[int], prompts: Sequence[Int64Array], *, push: bool
) -> None:
    """Computes what the encoder makes of whole prompts, into empty sequences of so many encoder positions. push:
    whether what is marked to be sent goes along."""
    assert model.encode is not None, "drafters stand beside decoders without an encoder"
    borders = [cache.sequence(sequence).border for sequence in sequence_ids]
    forward = cache.begin(Batch(sequence_ids, push=push, encodes=True))
    (ids,) = upload([np.concatenate(prompts)], model.device)
    model.encode(ids, [prompt.size for prompt in prompts], borders, forward.attention)
    cache.commit(forward)


def ends_of(cache: PagedKVCache, prompts: PromptChunks) -> tuple[Int64Array, Int64Array]:
    """Tokens of each chunk, and the rows of the last tokens of prompts that end with theirs. int64."""
    appends = np.array([chunk.size for chunk in prompts.chunks], np.int64)
    stored = np.array([cache.sequence(one).num_tokens for one in prompts.sequence_ids], np.int64)
    return appends, np.cumsum(appends)[stored + appends == np.array(prompts.lengths, np.int64)] - 1


def scored_prompts(
    model: Model,
    cache: PagedKVCache,
    prompts: PromptChunks,
    scored: Sequence[Scored | None],
    adapt: Adapt,
    *,
    push: bool,
) -> tuple[Tensor, list[PackedLogprobs]]:
    """Logits [n, vocab] after prompts that end here, and log-probabilities. scored[i]: whose are wanted after chunk
    i, or None. They come in this order, with copies that are queued."""
    appends, last_rows = ends_of(cache, prompts)
    begins = np.cumsum(appends) - appends
    wanted = [one for one in scored if one is not None]
    rows = [begin + np.arange(one.targets.size) for begin, one in zip(begins, scored, strict=True) if one]
    forward = cache.begin(Batch(prompts.sequence_ids, appends, prompts.lengths, push=push))
    arrays = [np.concatenate(prompts.chunks), np.concatenate((*rows, last_rows))]
    ids, all_rows, *targets = upload([*arrays, *(one.targets for one in wanted)], model.device)
    adapt(forward)
    hidden = model.hidden(ids, forward.attention, all_rows)
    cache.commit(forward)
    parts = hidden.split([*(len(one) for one in rows), len(last_rows)])
    found = [
        logprobs_of_targets(part, model.logits, tokens, one.num_top, model.config.vocab_size)
        for one, part, tokens in zip(wanted, parts[:-1], targets, strict=True)
    ]
    return model.logits(parts[-1]), found


def pooled_prompts(
    model: Model, cache: PagedKVCache, prompts: PromptChunks, readings: Sequence[Reading | None], adapt: Adapt
) -> Pooled:
    """readings[i]: what is read of chunk i, or None. Nothing is pushed. Copies of the values are queued."""
    appends = np.array([chunk.size for chunk in prompts.chunks], np.int64)
    begins = np.cumsum(appends) - appends
    wanted = [one for one in readings if one is not None]
    places = [begin + np.arange(one.begin, one.end) for begin, one in zip(begins, readings, strict=True) if one]
    forward = cache.begin(Batch(prompts.sequence_ids, appends, prompts.lengths, push=False))
    rows = np.concatenate(places) if places else np.zeros(0, np.int64)
    ids, all_rows = upload([np.concatenate(prompts.chunks), rows], model.device)
    adapt(forward)
    hidden = model.hidden(ids, forward.attention, all_rows)
    cache.commit(forward)
    return pool(hidden, wanted, model.logits, model.config.vocab_size)
