"""Grammars that end or delay the process that compiles them: a refusal, and nothing else ends."""

import asyncio
import json
from pathlib import Path

import pytest

from tandem.cluster.errors import InvalidRequest
from tandem.cluster.requests.reading import readers as module
from tandem.cluster.requests.reading.guide_checks import MOST_KNOWN, GuideChecks
from tandem.cluster.requests.reading.readers import Readers
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tandem.workers.sampling.guided import Guided
from tandem.workers.sampling.thinking import Thinking

LINKS = 4000
CHAIN = "start: r0\n" + "".join(f"r{number}: r{number + 1}\n" for number in range(LINKS)) + f'r{LINKS}: "a"'
DOUBLED = json.dumps(
    {
        "$ref": "#/$defs/0",
        "$defs": {
            "12": {},
            **{
                str(n): {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}, {"allOf": 2 * [{"$ref": f"#/$defs/{n + 1}"}]}]}
                for n in range(12)
            },
        },
    }
)
"""Each of its definitions asks for the next one three times."""
TOKENS = CHAIN.replace("r", "R").replace("staRt", "start")


def test_a_grammar_that_ends_its_compiler_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    make_checkpoint(folder, arch="qwen3", size="tiny", seed=1)

    async def run() -> None:
        readers = Readers(folder, ())
        checks = GuideChecks(readers, 512, (1,))
        try:
            for kind, text in (("grammar", CHAIN), ("grammar", TOKENS), ("json_schema", DOUBLED)):
                for _ in range(2):
                    with pytest.raises(InvalidRequest, match=r"^sampling\.guided: \w+ cannot be compiled: it is"):
                        await checks.check("a", Guided(kind, (text,)))
            for number in range(MOST_KNOWN + 2):
                await checks.check("a", Guided("regex", (f"a{{{number}}}",)))
            assert len(checks._known) == MOST_KNOWN
            with pytest.raises(InvalidRequest, match=r"^sampling\.guided: regex cannot be compiled: no text"):
                await checks.check("a", Guided("regex", (r"[^\s\S]",)))
            monkeypatch.setattr(module, "READ_SECONDS", 0.0)
            with pytest.raises(InvalidRequest, match=r"^sampling\.guided: regex takes more than 10 s to compile"):
                await checks.check("a", Guided("regex", ("b",)))
            monkeypatch.undo()
            await checks.check("a", Guided("regex", ("b",)))
            monkeypatch.setattr(module, "READ_SECONDS", 0.0)
            await checks.check("a", Guided("regex", ("b",), Thinking("<think>", "</think>")))  # known already
        finally:
            await readers.close()

    asyncio.run(run())
