"""Commands that the documentation shows: `tandem` takes each line that begins with it."""

import re

import click
import pytest

from tests.deploy.known import ROOT, parse_tandem, tandem_lines

FENCED = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in ROOT.glob("docs/*.md"))]


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_the_documentation_are_taken(page: str) -> None:
    for block in FENCED.findall((ROOT / page).read_text(encoding="utf-8")):
        for words in tandem_lines(block):
            parse_tandem(words)


@pytest.mark.parametrize("line", ["tandem serve F", "tandem up", "tandem up F --prot 1", "A=b tandem down --timeout x"])
def test_a_command_that_is_none_is_noticed(line: str) -> None:
    (words,) = tandem_lines(f"text\n{line}   # as here\nmore")
    with pytest.raises(click.UsageError):
        parse_tandem(words)
