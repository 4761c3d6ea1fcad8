from random import Random

import pytest

from tandem.workers.speculation.draft_length import LONGEST_PAUSE, Acceptance, DraftLength


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


def test_drafts_come_back_when_they_hold_again() -> None:
    length, output, seen = DraftLength(4), 1, 0
    for _ in range(500):
        drafted, output = length.next(output), output + 1
        if drafted:
            length.verified(drafted, 0, output)
    while length.next(output) < 4:
        drafted = length.next(output)
        output += 1 + drafted
        seen += 1
        if drafted:
            length.verified(drafted, drafted, output)
    assert seen <= LONGEST_PAUSE + 40


def test_a_new_sequence_begins_as_others_went() -> None:
    acceptance = Acceptance()
    assert DraftLength(8, acceptance.share).next(1) == DraftLength(8).next(1) == 4
    for _ in range(300):
        acceptance.verified(4, 0)
    unlikely = DraftLength(8, acceptance.share)
    assert (unlikely.next(1), unlikely.worth(1)) == (1, 0)
    for _ in range(100):
        acceptance.verified(4, 4)
    assert DraftLength(8, acceptance.share).next(1) == 4
