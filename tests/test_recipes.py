"""What is there was added as CONTRIBUTING.md says: the files that name it are those of the recipe, and few."""

import re
from fnmatch import fnmatch

import pytest

from tests.test_docs import CODE, PLACEHOLDER, ROOT, read

pytestmark = pytest.mark.check

PRODUCT = ("cache", "transfer", "workers", "cluster", "proto")
SOURCES = (".py", ".proto", ".c", ".h", ".cu", ".cuh")


def paths_of(recipe: str) -> set[str]:
    """Patterns of the paths in a section of CONTRIBUTING.md. A folder stands for all that lies in it."""
    section = read("CONTRIBUTING.md").partition(f"### {recipe}\n")[2].partition("\n### ")[0]
    paths = {PLACEHOLDER.sub("*", path) for path in CODE.findall(section) if path.startswith(PRODUCT) and "/" in path}
    return {f"{path}*" if path.endswith("/") else path for path in paths}


def files_that_name(pattern: str) -> set[str]:
    """The product's, as paths below the root."""
    found = re.compile(pattern)
    sources = (path for folder in PRODUCT for path in (ROOT / folder).rglob("*") if path.suffix in SOURCES)
    return {str(path.relative_to(ROOT)) for path in sources if found.search(path.read_text(encoding="utf-8"))}


@pytest.mark.parametrize(
    ("recipe", "name", "most"),
    [
        ("A model family", r"seed_oss|SeedOss", 4),
        ("A model family", r"glm4_moe_lite|Glm4MoeLite", 4),
        ("A routing policy", r"\bleast_loaded\b", 3),
        ("A quantization", r"mxfp4|MXFP4", 3),
        ("An HTTP route", r"/detokenize|Detokenize", 3),
        ("An attention backend", r"\bNativeKernels\b", 3),
        ("A transport", r"TcpTransport", 2),
    ],
)
def test_no_other_file_names_it(recipe: str, name: str, most: int) -> None:
    files, paths = files_that_name(name), paths_of(recipe)
    assert files
    assert not {file for file in files if not any(fnmatch(file, path) for path in paths)}
    assert len(files) <= most
