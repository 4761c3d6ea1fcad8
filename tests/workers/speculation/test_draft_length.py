from random import Random

import pytest

from tandem.workers.speculation.draft_length import LONGEST_PAUSE, DraftLength


@pytest.mark.parametrize(("holds", "least", "most"), [(0.0, 1, 2), (0.5, 1, 3), (0.7, 3, 5), (0.95, 8, 8)])
def test_lengths_follow_what_was_accepted(holds: float, least: int, most: int) -> None:
    length, random, drafted = DraftLength(8), Random(0), []
    for _ in range(400):
        count = length.next(1 << 30)
        accepted = next((place for place in range(count) if random.random() >= holds), count)
        length.verified(count, accepted, 0)
        drafted.append(count)
    assert all(1 <= count <= 8 for count in drafted)
    assert least <= sorted(drafted)[200] <= most


def test_drafts_that_mostly_hold_are_not_paused() -> None:
    length, random, paused = DraftLength(3), Random(1), 0
    for output in range(1, 400):
        count = length.next(output)
        paused += count == 0
        if count:
            length.verified(count, next((place for place in range(count) if random.random() >= 0.7), count), output)
    assert paused <= 4


def test_drafts_that_never_hold_become_rare() -> None:
    length, output, drafts = DraftLength(4), 1, 0
    for _ in range(1000):
        drafted = length.next(output)
        output += 1
        if drafted:
            drafts += 1
            length.verified(drafted, 0, output)
    assert drafts <= 8 + 1000 // LONGEST_PAUSE
    output += LONGEST_PAUSE
    assert length.next(output) == 1
    length.verified(1, 1, output)
    assert length.next(output) == 1, "one that holds ends the pause"
    length.verified(1, 0, output)
    assert length.next(output + 1) == 0
    assert length.next(output + 2) == 1, "and the next one is short"
