"""Drafts between two verify steps against look_up(): torch's, and Triton's on a GPU, else in its interpreter."""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tandem.cache.plan.arrays import Int64Array
from tandem.workers.kernels.base import FOLLOWS, DraftKernels, EnteringRows, FollowingRows, Histories
from tandem.workers.kernels.choice import choose_draft_kernels
from tandem.workers.kernels.torch.drafts import TorchDraftKernels
from tandem.workers.kernels.triton.drafts import TritonDraftKernels
from tandem.workers.runner.step_inputs import ON_HOST
from tandem.workers.sampling.posted_samples import NOT_FINITE
from tandem.workers.sampling.random import uniform
from tandem.workers.speculation.ngram import look_up

GPU = "cuda" if torch.cuda.is_available() else "cpu"
CAPACITY = 300
UNTOUCHED = -7


class Backend(NamedTuple):
    kernels: DraftKernels
    device: str

    def tensor(self, array: Int64Array | list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(array, dtype=dtype, device=self.device)

    def histories(self, contexts: list[Int64Array], capacity: int = CAPACITY) -> Histories:
        """Makes histories in which a match stands after each context."""
        tokens = np.stack([np.pad(one, (0, capacity - one.size), constant_values=one[-1]) for one in contexts])
        lengths = [one.size for one in contexts]
        surplus = [10 + sequence for sequence in range(len(contexts))]
        return Histories(
            self.tensor(tokens, torch.int32), self.tensor(lengths, torch.int32), self.tensor(surplus, torch.int32)
        )


BACKENDS = {
    "torch": Backend(TorchDraftKernels(), "cpu"),
    "triton": Backend(TritonDraftKernels(), GPU),
    "triton in small blocks": Backend(TritonDraftKernels(block=16), GPU),
}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return BACKENDS[request.param]


@dataclass
class VerifyStep:
    """Its rows; arrays [T]."""

    tokens: Int64Array
    sampled: Int64Array
    positions: Int64Array
    preceding: Int64Array

    def accept(self, backend: Backend, histories: Histories) -> None:
        backend.kernels.accept(
            backend.tensor(self.tokens),
            backend.tensor(self.sampled),
            backend.tensor(self.positions),
            backend.tensor(self.preceding, torch.int32),
            histories,
        )

    def accepted(self) -> list[tuple[int, list[int], int]]:
        """Returns for each sequence the position of its first row, the tokens found, and the number of other rows."""
        sequences: list[tuple[int, list[int], int]] = []
        begins = [*np.flatnonzero(self.preceding == 0), self.tokens.size]
        for begin, end in pairwise(begins):
            found = [int(self.sampled[begin])]
            for row in range(begin + 1, end):
                if self.tokens[row] != found[-1]:
                    break
                found.append(int(self.sampled[row]))
            sequences.append((int(self.positions[begin]), found, end - begin - len(found)))
        return sequences


def verify_step(rng: np.random.Generator, firsts: list[int], right: float, vocab: int = 3) -> VerifyStep:
    """Makes a step of sequences whose first rows stand at these positions, with 1 to 6 rows each. right: the share of
    drafted tokens that equal the samples."""
    counts = rng.integers(1, 7, len(firsts))
    preceding = np.concatenate([np.arange(count) for count in counts])
    sampled = rng.integers(0, vocab, preceding.size)
    sampled[rng.random(sampled.size) < 0.05] = NOT_FINITE
    before = np.concatenate(([0], sampled[:-1]))
    tokens = np.where(rng.random(sampled.size) < right, before, (before + 1) % vocab)
    return VerifyStep(tokens, sampled, np.repeat(firsts, counts) + preceding, preceding)


def follow(
    backend: Backend, sources: list[int], preceding: list[int], histories: Histories, max_ngram: int
) -> tuple[list[int], list[int]]:
    """Input tokens and shift of a step with these rows, whose numbers to sample with are right."""
    tokens, rng = backend.tensor([UNTOUCHED] * len(sources)), np.random.default_rng(len(sources))
    seeds = rng.integers(0, 1 << 64, len(sources), np.uint64)
    positions = rng.integers(100, 1 << 20, len(sources))
    numbers, rows = backend.tensor(seeds.view(np.int64)), backend.tensor(sources)
    of_rows = FollowingRows(tokens, rows, backend.tensor(positions), numbers, backend.tensor(preceding, torch.int32))
    shift = backend.kernels.follow(of_rows, histories, max_ngram)
    assert shift.dtype == torch.int32
    drawn = uniform(seeds, positions - shift.cpu().numpy() + 1).view(np.int64)
    follows = np.array(sources) <= FOLLOWS
    assert numbers.tolist() == np.where(follows, drawn, seeds.view(np.int64)).tolist()
    return tokens.tolist(), shift.tolist()


def drafted(context: Int64Array, rows: int, max_ngram: int) -> list[int]:
    """The input tokens of a sequence that follows."""
    line = [int(context[-1]), *look_up(context, max_ngram, rows - 1).tolist()]
    return [0 if token == NOT_FINITE else token for token in line] + [0] * (rows - len(line))


def contexts_of(rng: np.random.Generator, sizes: list[int], vocab: int) -> list[Int64Array]:
    contexts = [rng.integers(0, vocab, size) for size in sizes]
    for context in contexts:
        context[context == 2] = NOT_FINITE
    return contexts


@pytest.mark.parametrize("right", [0, 0.6, 1])
@pytest.mark.parametrize("num_sequences", [1, 2, 9, 40])
def test_accepted_tokens_join_the_histories(backend: Backend, num_sequences: int, right: float) -> None:
    """Padding, sequences without rows and what stands after the capacity change nothing."""
    rng = np.random.default_rng(num_sequences)
    for num_kept in (num_sequences, max(1, num_sequences - 2), num_sequences + 2):
        firsts = rng.integers(0, CAPACITY - 10, num_sequences)
        firsts[0] = CAPACITY - 3
        step = verify_step(rng, firsts.tolist(), right)
        histories = backend.histories(contexts_of(rng, [5] * num_kept, 3))
        expected = [one.tolist() for one in vars(histories).values()]
        for sequence, (first, found, surplus) in enumerate(step.accepted()[:num_kept]):
            for position, token in enumerate(found, first + 1):
                if position < CAPACITY:
                    expected[0][sequence][position] = token
            expected[1][sequence] = first + len(found) + 1
            expected[2][sequence] = surplus
        step.accept(backend, histories)
        assert [one.tolist() for one in vars(histories).values()] == expected


def test_a_right_token_behind_a_wrong_one_does_not_hold(backend: Backend) -> None:
    """Nor does the first row of a sequence, which holds, stand for a wrong row of the sequence before."""
    step = VerifyStep(
        tokens=np.array([1, 2, 9, 4, 5, 1, 5, 3]),
        sampled=np.array([2, 3, 4, 5, 1, 5, 6, 7]),
        positions=np.array([3, 4, 5, 6, 7, 0, 1, 2]),
        preceding=np.array([0, 1, 2, 3, 4, 0, 1, 2]),
    )
    histories = backend.histories([np.array([1])] * 2, capacity=9)
    step.accept(backend, histories)
    assert histories.tokens.tolist() == [[1, 1, 1, 1, 2, 3, 1, 1, 1], [1, 5, 6, 1, 1, 1, 1, 1, 1]]
    assert (histories.lengths.tolist(), histories.surplus.tolist()) == ([6, 3], [3, 1])


@pytest.mark.gate("torch-*", "triton-*", "triton in small blocks-3-3")
@pytest.mark.parametrize("max_ngram", [1, 2, 3, 5])
@pytest.mark.parametrize("vocab", [2, 3, 12])
def test_drafts_are_those_of_look_up(backend: Backend, vocab: int, max_ngram: int) -> None:
    """Sequences come in any order, and some do not follow. There are rows beyond a draft's end."""
    rng = np.random.default_rng(vocab * 10 + max_ngram)
    sizes = [1, 2, 3, 15, 16, 17, 33, CAPACITY, *rng.integers(1, CAPACITY, 6).tolist()]
    contexts = contexts_of(rng, sizes, vocab)
    histories = backend.histories(contexts)
    sources, preceding, tokens, shift = [], [], [], []
    for sequence in rng.permutation(len(sizes)).tolist():
        rows, follows = int(rng.integers(1, 7)), rng.random() < 0.8
        sources += [FOLLOWS - sequence if follows else int(rng.integers(ON_HOST, 3))] * rows
        preceding += range(rows)
        tokens += drafted(contexts[sequence], rows, max_ngram) if follows else [UNTOUCHED] * rows
        shift += [10 + sequence if follows else 0] * rows
    assert follow(backend, sources, preceding, histories, max_ngram) == (tokens, shift)


def test_the_longest_match_wins_and_then_the_first(backend: Backend) -> None:
    """It does wherever the borders of blocks lie."""
    for begin in range(16):
        context = np.concatenate(
            (np.arange(50, 50 + begin), [3, 10], [2, 3, 11], [1, 2, 3, 12], [1, 2, 3, 13], [9, 1, 2, 3])
        )
        for max_ngram, token in ((1, 10), (2, 11), (3, 12), (4, 12)):
            histories = backend.histories([context])
            tokens, _ = follow(backend, [FOLLOWS] * 2, [0, 1], histories, max_ngram)
            assert tokens == [3, token] == drafted(context, 2, max_ngram)


def test_no_token_without_an_embedding_is_filled_in(backend: Backend) -> None:
    context = np.array([5, NOT_FINITE, NOT_FINITE, 6, NOT_FINITE])
    tokens, _ = follow(backend, [FOLLOWS] * 5, list(range(5)), backend.histories([context]), 2)
    assert tokens == [0, 0, 6, 0, 0]


def test_drafts_that_a_model_has_put_behind_the_histories(backend: Backend) -> None:
    """Some sequences have drafts, in another order and beside padding, up to the end of the memory."""
    lengths = [1, 6, 18, 20]
    histories = backend.histories([np.arange(length) for length in lengths], capacity=20)
    before = histories.tokens.tolist()
    drafts = {2: [50, NOT_FINITE, 52], 0: [60, 61, 62], 3: [70, 71, 72]}
    sources = backend.tensor([*(FOLLOWS - sequence for sequence in drafts), 0, ON_HOST])
    for number, tokens in enumerate(zip(*drafts.values(), strict=True)):
        backend.kernels.put(sources, backend.tensor([*tokens, 9, 9, 9]), number, histories)
    for sequence, draft in drafts.items():
        before[sequence] = [*before[sequence][: lengths[sequence]], *draft, *before[sequence][lengths[sequence] + 3 :]]
        stands = [lengths[sequence] - 1, *draft[: 20 - lengths[sequence]], 0, 0, 0][:4]
        tokens, shift = follow(backend, [FOLLOWS - sequence] * 4, list(range(4)), histories, 0)
        assert (tokens, shift) == ([0 if one == NOT_FINITE else one for one in stands], [10 + sequence] * 4)
    assert histories.tokens.tolist() == [line[:20] for line in before]


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_chain_enters_what_stands_behind_the_histories(backend: Backend, ahead: int) -> None:
    """Some sequences enter, in another order and beside padding, up to the end of the memory."""
    rng = np.random.default_rng(ahead)
    contexts = contexts_of(rng, [1, 6, 18, 20], vocab=9)
    histories = backend.histories(contexts, capacity=20)
    tokens, surplus = histories.tokens.tolist(), histories.surplus.tolist()
    sequences, steps = [2, 0, None, 3, None], np.array([3, 0, 0, 1, 0])
    sources = [0 if sequence is None else FOLLOWS - sequence for sequence in sequences]
    seeds, positions = rng.integers(0, 1 << 64, len(sources), np.uint64), rng.integers(100, 1 << 20, len(sources))
    rows = EnteringRows(*map(backend.tensor, (sources, positions, seeds.view(np.int64), steps)))
    for number in range(4):
        entered = backend.kernels.enter(rows, number, ahead, histories)
        assert [one.dtype for one in entered] == [torch.int64, torch.int64, torch.int32]
        for row, sequence in enumerate(sequences):
            actual = [int(one[row]) for one in entered]
            if sequence is None:
                assert actual == [0, int(seeds.view(np.int64)[row]), 0]
                continue
            behind = (tokens[sequence] + [0] * 4)[contexts[sequence].size - 1 + number]
            at = int(positions[row]) + number - surplus[sequence] + 1
            shift = surplus[sequence] + (int(steps[row]) if number == ahead else 0)
            if number > ahead:
                shift = -1 if steps[row] >= number - ahead else 0
            drawn = uniform(seeds[row : row + 1], np.array([at])).view(np.int64).tolist()
            assert actual == [0 if behind == NOT_FINITE else behind, *drawn, shift]


@pytest.mark.parametrize("right", [0, 0.7, 1])
def test_a_step_follows_as_if_the_host_had_read_the_one_before(backend: Backend, right: float) -> None:
    """It does over several steps, whose rows are sequences in one order with unlike drafts."""
    rng = np.random.default_rng(17)
    contexts = [rng.integers(0, 3, size) for size in rng.integers(1, 200, 6)]
    histories = backend.histories(contexts)
    for _ in range(2):
        step = verify_step(rng, [one.size - 1 for one in contexts], right)
        step.accept(backend, histories)
        accepted = step.accepted()
        contexts = [np.append(one, found) for one, (_, found, _) in zip(contexts, accepted, strict=True)]
        counts = rng.integers(1, 7, len(contexts)).tolist()
        sources = [FOLLOWS - sequence for sequence, count in enumerate(counts) for _ in range(count)]
        preceding = [row for count in counts for row in range(count)]
        tokens, shift = follow(backend, sources, preceding, histories, 3)
        assert tokens == [token for one, rows in zip(contexts, counts, strict=True) for token in drafted(one, rows, 3)]
        assert shift == [accepted[FOLLOWS - source][2] for source in sources]


def test_kernels_suit_their_device() -> None:
    assert isinstance(choose_draft_kernels(torch.device("cpu")), TorchDraftKernels)
    assert isinstance(choose_draft_kernels(torch.device("cuda")), TritonDraftKernels)
