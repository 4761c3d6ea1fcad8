"""Drafts between two verify steps on the device itself, without the host."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tandem.cache.attention.graph_buffers import GraphBuffers
from tandem.cache.kernels.upload import upload
from tandem.cache.plan.arrays import Int64Array
from tandem.workers.kernels.base import Entered, EnteringRows, FollowingRows, Histories
from tandem.workers.kernels.choice import choose_draft_kernels

HISTORY_BYTES = 256 << 20  # of what memory_budget leaves for graphs and their buffers


class NextDrafts:
    """Holds the tokens of a verify step's sequences, and what came of its drafts. So a verify step can be launched
    while the one before runs: the host plans it as if all drafts held.

        verify step ──► accept(): which drafts hold
                            │     histories and counts
                            ├──► DraftChain, where a model drafts: enter() and put() of each of its steps
                            │     drafts after the histories
        follow(): last tokens, drafts after them, how much earlier rows stand ──► verify step that follows ──► accept()
    """

    def __init__(self, num_sequences: int, length: int, max_ngram: int, device: torch.device) -> None:
        """num_sequences: of a step, at most; fewer where their tokens would take more than HISTORY_BYTES. length: most
        tokens of a sequence. max_ngram: see NgramDrafter; 0: a DraftChain drafts, and nothing is looked up."""
        num_sequences = max(1, min(num_sequences, HISTORY_BYTES // (4 * length)))
        counts = torch.zeros((2, num_sequences), dtype=torch.int32, device=device)
        tokens = torch.zeros((num_sequences, length), dtype=torch.int32, device=device)
        self._histories = Histories(tokens, counts[0], counts[1])
        self._kernels = choose_draft_kernels(device)
        self._max_ngram = max_ngram

    @property
    def looks_up(self) -> bool:
        """Whether drafts come from the histories; else from a DraftChain."""
        return self._max_ngram > 0

    @property
    def num_sequences(self) -> int:
        """The most sequences of a verify step that follows an unread one."""
        return self._histories.tokens.shape[0]

    @torch.inference_mode()
    def remember(self, contexts: Sequence[Int64Array]) -> None:
        """The tokens, int64 [n], of each sequence of the verify step launched last, up to its first input. Once, before
        a step follows that one, where drafts are looked up."""
        (on_device,) = upload([np.concatenate(contexts)], self._histories.tokens.device)
        parts = on_device.split([one.size for one in contexts])
        for tokens, part in zip(self._histories.tokens, parts, strict=False):
            tokens[: part.shape[0]].copy_(part)

    def follow(self, buffers: GraphBuffers) -> Tensor:
        """Computes the rows of a step that follows. See DraftKernels.follow, and the shift of
        GraphBuffers.attention."""
        tokens, sources, _, uniforms, *_ = buffers.inputs
        rows = FollowingRows(tokens, sources, buffers.positions, uniforms, buffers.preceding)
        return self._kernels.follow(rows, self._histories, self._max_ngram)

    def accept(self, buffers: GraphBuffers, sampled: Tensor) -> None:
        """See DraftKernels.accept."""
        tokens = buffers.inputs[0]
        self._kernels.accept(tokens, sampled, buffers.positions, buffers.preceding, self._histories)

    def enter(self, rows: EnteringRows, number: int, ahead: int) -> Entered:
        """Returns the inputs of step `number` of a chain; see DraftKernels.enter."""
        return self._kernels.enter(rows, number, ahead, self._histories)

    def put(self, sources: Tensor, number: int, drafted: Tensor) -> None:
        """Stores the drafts of step `number` of the chain, int64 [n]; see DraftKernels.put."""
        self._kernels.put(sources, drafted, number, self._histories)
