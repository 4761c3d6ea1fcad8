"""Measures how long the sentences of Markdown files are: `python -m tests.support.prose [FILE …]`.

Prints the share of sentences with at most MOST_WORDS words, and with --long the others. Exits with 1 where the share of
a file is below LEAST_SHARE. Code blocks, tables and headings are no sentences.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = ("README.md", "ARCHITECTURE.md")
MOST_WORDS = 25
LEAST_WORDS = 3  # fewer are a name or a label, and would flatter the share
LEAST_SHARE = 0.9

FENCED = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
ITEM = re.compile(r"^\s*([-*+]|\d+\.)\s+")
NO_PROSE = ("#", "|", "<!--")
END = re.compile(r"(?<=[.!?])[)\"*_]*\s+(?=[^a-z])")  # a full stop before a small letter ends an abbreviation


def sentences(markdown: str) -> list[str]:
    """Returns the sentences of paragraphs and list items, each in one line, with at least LEAST_WORDS words."""
    text = LINK.sub(r"\1", FENCED.sub("\n", markdown))
    found = (sentence for block in _blocks(text.splitlines()) for sentence in END.split(block))
    return [sentence for sentence in found if num_words(sentence) >= LEAST_WORDS]


def num_words(sentence: str) -> int:
    """Counts words. Signs alone, as → or =, are no words."""
    return sum(any(map(str.isalnum, word)) for word in sentence.split())


def share_of_short(markdown: str) -> float:
    """Returns the share of short sentences, in [0, 1]; 1 if there is no sentence."""
    found = sentences(markdown)
    return sum(num_words(sentence) <= MOST_WORDS for sentence in found) / len(found) if found else 1.0


def _blocks(lines: Sequence[str]) -> Iterator[str]:
    """Yields paragraphs and list items, each in one line."""
    block: list[str] = []
    for line in (*lines, ""):
        words = "" if line.lstrip().startswith(NO_PROSE) else line.strip()
        if not words or ITEM.match(line):
            yield " ".join(block)
            block = []
        if words:
            block.append(ITEM.sub("", words))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, default=[ROOT / name for name in FILES])
    parser.add_argument("--long", action="store_true", help="print the sentences that are too long")
    given = parser.parse_args()
    shares: list[float] = []
    for file in given.files:
        text = file.read_text(encoding="utf-8")
        shares.append(share_of_short(text))
        print(f"{file.name}: {len(sentences(text))} sentences, {shares[-1]:.1%} of at most {MOST_WORDS} words")
        for sentence in sentences(text) if given.long else ():
            if num_words(sentence) > MOST_WORDS:
                print(f"  {num_words(sentence)}: {sentence}")
    return 1 if min(shares, default=1.0) < LEAST_SHARE else 0


if __name__ == "__main__":
    sys.exit(main())
