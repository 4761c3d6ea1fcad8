"""Nobody asks for the class of a plan, of graph buffers, of a backend, of a kind or of a prompt: these answer for
themselves. Packages in which this holds are read from their sources."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.check

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    *("cache/attention", "cache/operations", "cache/kernels"),
    *("workers/decode", "workers/engine", "workers/prefill", "workers/runner"),
)
VALUES = {"EntryLayout", "RopeParameters", "Silu", "slice"}  # what is in a plan, or in a model's configuration
ERRORS = {"CorruptKV", "LogitsNotFinite", "PeerGone", "WorkerError"}


def asked(source: str) -> Iterator[str]:
    """The last names of what each isinstance() compares with."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            for name in ast.walk(node.args[1]):
                if isinstance(name, ast.Name | ast.Attribute):
                    yield name.id if isinstance(name, ast.Name) else name.attr


def test_every_class_is_found() -> None:
    source = "isinstance(a, A) or [isinstance(b, B | c.C), isinstance(d, (D, E))]"
    assert {*asked(source)} == {"A", "B", "c", "C", "D", "E"}


@pytest.mark.parametrize("package", PACKAGES)
def test_nobody_asks_for_a_class(package: str) -> None:
    paths = [*(ROOT / package).rglob("*.py")]
    assert paths
    found = {path.name: {*asked(path.read_text(encoding="utf-8"))} - VALUES - ERRORS for path in paths}
    assert {name: classes for name, classes in found.items() if classes} == {}
