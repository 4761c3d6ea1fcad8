"""Chains of verify steps whose drafts are looked up, by the host or by the device."""

from typing import NamedTuple

import numpy as np

from tandem.cache.plan.arrays import Int64Array
from tandem.workers.sampling.pending_samples import PendingSamples
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.sampling.sampling_params import SamplingParams
from tandem.workers.speculation.ngram import look_up
from tests.support.oracle import random_prompt
from tests.support.prompt_programs import PromptRunner

MAX_NGRAM, MOST, NUM_TOKENS = 2, 4, 70
SEQUENCES = (0, 1, 2)


class Launched(NamedTuple):
    sizes: list[int]  # drafted tokens of each sequence
    pending: PendingSamples


class Chain:
    """Outputs of SEQUENCES, whose prompts repeat themselves."""

    def __init__(self, runner: PromptRunner, seed: int, *, temperature: float = 0.0) -> None:
        self.runner, self._draws = runner, np.random.default_rng(seed)
        self._sampling = SampleBatch.from_params(
            [SamplingParams(temperature=temperature, seed=seed << 40 | one) for one in SEQUENCES]
        )
        self.contexts: list[list[int]] = []
        self.accepted = self.drafted = 0
        for sequence in SEQUENCES:
            prompt = random_prompt(3 + 5 * sequence, seed + sequence) * 2  # so that there is something to look up
            runner.cache.add_sequence(sequence)
            logits = runner.forward({sequence: prompt}, {sequence: len(prompt)})
            self.contexts.append([*prompt, int(logits.argmax())])

    def plain(self) -> list[list[int]]:
        """Returns the contexts after steps of one token."""
        while min(map(len, self.contexts)) < NUM_TOKENS:
            lengths = np.array([len(one) for one in self.contexts])
            last = np.array([one[-1] for one in self.contexts])
            pending = self.runner.runner.step(SEQUENCES, last, np.full(last.size, -1), self._sampling, lengths)
            for context, token in zip(self.contexts, pending.wait().token_ids.tolist(), strict=True):
                context.append(token)
        return self.contexts

    def run(self, *, follows: bool = True) -> list[list[int]]:
        """Returns the contexts after chains of verify steps with drafts of different lengths. follows: each step is
        launched before the previous one is read."""
        while min(map(len, self.contexts)) < NUM_TOKENS:
            sizes = self._sizes()
            drafts = self._look_up(sizes)
            step = self._launch(drafts)
            if follows:
                self._remember()
            for _ in range(int(self._draws.integers(0, 7))):
                sizes = self._sizes()
                following = self._following(step, sizes) if follows else None
                self._read(step, drafts)
                drafts = self._look_up(sizes)
                step = self._launch(drafts) if following is None else following
            self._read(step, drafts)
        return self.contexts

    def _sizes(self) -> list[int]:
        return self._draws.integers(0, MOST + 1, len(SEQUENCES)).tolist()

    def _look_up(self, sizes: list[int]) -> list[Int64Array]:
        drafts = []
        for context, size in zip(self.contexts, sizes, strict=True):
            drafts.append(np.zeros(size, np.int64))
            found = look_up(np.array(context), MAX_NGRAM, size)
            drafts[-1][: found.size] = found
        return drafts

    def _launch(self, drafts: list[Int64Array]) -> Launched:
        tokens = [np.array([one[-1], *draft]) for one, draft in zip(self.contexts, drafts, strict=True)]
        positions = np.array([len(one) for one in self.contexts])
        pending = self.runner.runner.verify(SEQUENCES, tokens, self._sampling, positions)
        return Launched([draft.size for draft in drafts], pending)

    def _remember(self) -> None:
        assert self.runner.runner.next_drafts is not None
        self.runner.runner.next_drafts.remember([np.array(one) for one in self.contexts])

    def _following(self, before: Launched, sizes: list[int]) -> Launched:
        positions = np.array([len(one) + size + 1 for one, size in zip(self.contexts, before.sizes, strict=True)])
        unknown = [np.zeros(size + 1, np.int64) for size in sizes]
        pending = self.runner.runner.verify(SEQUENCES, unknown, self._sampling, positions, follows=True)
        return Launched(sizes, pending)

    def _read(self, step: Launched, drafts: list[Int64Array]) -> None:
        sampled = step.pending.wait().token_ids
        begin, surplus = 0, []
        for context, draft in zip(self.contexts, drafts, strict=True):
            tokens = sampled[begin : begin + draft.size + 1]
            held = int(np.cumprod(draft == tokens[:-1]).sum())
            context += tokens[: held + 1].tolist()
            surplus.append(draft.size - held)
            self.accepted, self.drafted, begin = self.accepted + held, self.drafted + draft.size, begin + tokens.size
        if any(surplus):
            self.runner.cache.pop_each(SEQUENCES, surplus)
