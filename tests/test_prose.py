"""Whether the documentation can be read: short sentences, and no more than a reader has time for."""

from pathlib import Path

import pytest

from tests.support.prose import LEAST_SHARE, MOST_WORDS, num_words, sentences, share_of_short

pytestmark = pytest.mark.check

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in ROOT.glob("docs/*.md"))]
README_LINES = 150
ARCHITECTURE_WORDS = 2500


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PAGES)
def test_nine_sentences_in_ten_are_short(name: str) -> None:
    long = [sentence for sentence in sentences(read(name)) if num_words(sentence) > MOST_WORDS]
    assert share_of_short(read(name)) >= LEAST_SHARE, long


def test_the_readme_fits_on_three_screens() -> None:
    assert len(read("README.md").splitlines()) <= README_LINES


def test_the_architecture_is_read_in_ten_minutes() -> None:
    assert num_words(read("ARCHITECTURE.md")) <= ARCHITECTURE_WORDS


@pytest.mark.parametrize(
    ("markdown", "expected"),
    [
        (
            "One is here. Two is here!\nThree is here? Four is",
            ["One is here.", "Two is here!", "Three is here?", "Four is"],
        ),
        ("# No sentence is this\n\n| nor is this |\n", []),
        ("a b c:\n\n```\nno words of these\n```\nd e f", ["a b c:", "d e f"]),
        (
            "- An item is one\n  sentence over lines\n- another item here\n1. a third one",
            ["An item is one sentence over lines", "another item here", "a third one"],
        ),
        ("See [the page of that](a.md) → now", ["See the page of that → now"]),
        (
            "It takes 3.7 ms, i.e. little (as measured). Then it ends",
            ["It takes 3.7 ms, i.e. little (as measured).", "Then it ends"],
        ),
        ("Two words. Yes", []),
    ],
)
def test_sentences_are_found(markdown: str, expected: list[str]) -> None:
    found = sentences(markdown)
    assert found == [sentence for sentence in expected if num_words(sentence) >= 3]
