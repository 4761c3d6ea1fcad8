"""Prompt chunks, what an encoder computes of them before the decoder does, and what a head computes afterwards."""

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
        """int64 [n or more], of the prompts that end in the forward."""
        self.follow(first_tokens)
        self.cache.commit(self.forward)


def encoded(model: Model, cache: PagedKVCache, prompts: PromptChunks, *, push: bool) -> PromptChunks:
    """Encodes what chunks begin with of an encoder's prompt; what is left of them. push: see encode()."""
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
