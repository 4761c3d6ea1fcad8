from random import Random

import pytest

from tandem.workers.speculation.draft_length import LONGEST_PAUSE, Acceptance, DraftLength
from tandem.workers.speculation.draft_policy import COMPUTING, FOLLOWING, FOLLOWING_CHAIN, WAITING, Cost, best_lengths

SHARES = range(101)  # as `best`: the share that holds itself


def run(length: DraftLength, best: tuple[int, ...], holds: float, output: int, random: Random) -> int:
    """Tokens drafted, once."""
    count = length.next(output, best)
    if count:
        length.verified(count, next((place for place in range(count) if random.random() >= holds), count), output)
    return count


@pytest.mark.parametrize(("holds", "least", "most"), [(0.0, 0, 5), (0.5, 35, 65), (0.7, 55, 85), (0.95, 90, 100)])
def test_the_share_follows_what_was_accepted(holds: float, least: int, most: int) -> None:
    length, random, shares = DraftLength(), Random(0), []
    for turn in range(400):
        run(length, (8,) * 101, holds, 100 * turn, random)  # a pause ends before the next
        shares.append(length.next(100 * turn + 99, SHARES))
    assert least <= sorted(shares)[200] <= most


def test_drafts_that_mostly_hold_are_not_paused() -> None:
    length, random = DraftLength(), Random(1)
    assert sum(run(length, (3,) * 101, 0.7, output, random) == 0 for output in range(1, 400)) <= 4


def test_drafts_that_never_hold_become_rare() -> None:
    best = (1,) * 50 + (4,) * 51
    length, output, drafts = DraftLength(), 1, 0
    for _ in range(1000):
        drafted = length.next(output, best)
        output += 1
        if drafted:
            drafts += 1
            length.verified(drafted, 0, output)
    assert drafts <= 8 + 1000 // LONGEST_PAUSE
    output += LONGEST_PAUSE
    assert length.next(output, best) == 1
    length.verified(1, 1, output)
    assert length.next(output, best) == 1, "one that holds ends the pause"
    length.verified(1, 0, output)
    assert length.next(output + 1, best) == 0
    assert length.next(output + 2, best) == 1, "and the next one is short"


def test_drafts_come_back_when_they_hold_again() -> None:
    best = (1,) * 60 + (4,) * 41
    length, output, seen = DraftLength(), 1, 0
    for _ in range(500):
        drafted, output = length.next(output, best), output + 1
        if drafted:
            length.verified(drafted, 0, output)
    while length.next(output, best) < 4:
        drafted = length.next(output, best)
        output += 1 + drafted
        seen += 1
        if drafted:
            length.verified(drafted, drafted, output)
    assert seen <= LONGEST_PAUSE + 40


def test_a_new_sequence_begins_as_others_went() -> None:
    acceptance = Acceptance()
    assert DraftLength(acceptance.share).next(1, SHARES) == DraftLength().next(1, SHARES) == 75
    for _ in range(300):
        acceptance.verified(4, 0)
    unlikely = DraftLength(acceptance.share)
    assert unlikely.next(1, SHARES) < 5
    assert unlikely.worth(1) == 0
    for _ in range(100):
        acceptance.verified(4, 4)
    assert DraftLength(acceptance.share).next(1, SHARES) == 75


@pytest.mark.parametrize("cost", [WAITING, COMPUTING, FOLLOWING, FOLLOWING_CHAIN])
@pytest.mark.parametrize("rows", [1, 8, 32])
def test_the_best_lengths_give_the_most_tokens_per_time(cost: Cost, rows: int) -> None:
    """The tokens are counted as if each drafted token that is tried stood for itself."""
    best = best_lengths(cost, rows, 7)
    assert (best[0], best[100]) == (1, 7)
    assert list(best) == sorted(best), "the more holds, the longer"
    for share in (0.3, 0.5, 0.7, 0.9):

        def output(drafted: int, share: float = share) -> float:
            tokens = 1 + sum(share**place for place in range(1, drafted + 1))
            longest = cost.draft_step * drafted
            return tokens / (1 + cost.verify + cost.token * rows * drafted + longest)

        others = [output(drafted) for drafted in range(1, 8)]
        assert output(best[round(100 * share)]) == pytest.approx(max(others))
