"""Whether the documentation speaks of what is there: paths, links, configuration keys and their defaults."""

import fnmatch
import re
import runpy
import subprocess
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tandem.cache.extras import DISTRIBUTION
from tandem.cluster.config.cluster_config import ClusterConfig

pytestmark = pytest.mark.check

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in ROOT.glob("docs/*.md"))]
FOLDERS = ("cache", "transfer", "workers", "cluster", "proto", "tests", "deploy", "docs", ".ci")
OURS = (".py", ".cu", ".cuh", ".c", ".h", ".proto", ".yaml", ".md", ".toml")  # names of files that stand alone
NAMES = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*")} | {
    path.name for path in ROOT.iterdir()
}
LINKED = [*PAGES, "CHANGELOG.md", *(f"docs/decisions/{path.name}" for path in ROOT.glob("docs/decisions/*.md"))]
SECTIONS = [name for name, value in ClusterConfig().model_dump().items() if isinstance(value, dict)]

CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(#[^)]*)?\)")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
INSTALL = re.compile(r"""(?:pip3?|uv) install[^\n&;`]*""")
ANOTHER = re.compile(r"""[ '"]tandem(?:\[|['" =<>`]|$)""")
PLACEHOLDER = re.compile(r"<[^>]+>")
KEY = re.compile(rf"(?<![\w/])({'|'.join(SECTIONS)})\.(?!py\b)(\w+)")


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def paths(text: str) -> set[str]:
    """Words of code, in a line or a block, that are paths of this repository or names of its files."""
    words = {word for code in (*CODE.findall(FENCED.sub("", text)), *FENCED.findall(text)) for word in code.split()}
    named = {word.strip("`'\",:;()[]") for word in words}
    return {
        word
        for word in named
        if word.startswith(tuple(f"{folder}/" for folder in FOLDERS)) or (word.endswith(OURS) and "/" not in word)
    }


def exists(path: str) -> bool:
    """<placeholders> stand for anything."""
    pattern = PLACEHOLDER.sub("*", path.rstrip("/"))
    return any(ROOT.glob(pattern)) if "/" in path else bool(fnmatch.filter(NAMES, pattern))


def anchors(text: str) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_paths_exist(page: str) -> None:
    assert {path for path in paths(read(page)) if not exists(path)} == set()


@pytest.mark.parametrize("page", LINKED)
def test_links_lead_somewhere(page: str) -> None:
    broken = []
    for target, anchor in LINK.findall(read(page)):
        file = (ROOT / page).parent / target if target else ROOT / page
        if not file.exists() or (anchor and anchor[1:] not in anchors(file.read_text(encoding="utf-8"))):
            broken.append(target + anchor)
    assert broken == []


@pytest.mark.parametrize("page", PAGES)
def test_configuration_keys_exist(page: str) -> None:
    named = set(KEY.findall(" ".join(CODE.findall(FENCED.sub("", read(page))))))
    defaults = ClusterConfig().model_dump()
    assert {f"{section}.{key}" for section, key in named if key not in defaults[section]} == set()


def test_the_configuration_page_is_up_to_date() -> None:
    generate = runpy.run_path(str(ROOT / "docs/generate.py"))["generate"]
    assert read("docs/configuration.md") == generate(), "run `make docs`"


def test_a_path_that_is_not_there_is_noticed() -> None:
    text = "`cache/nothing.py` and `cache/digest.py`, `nothing.py`\n```\ntandem up deploy/nothing.yaml\n```\n`a.json`"
    assert paths(text) == {"cache/nothing.py", "cache/digest.py", "nothing.py", "deploy/nothing.yaml"}
    assert [path for path in sorted(paths(text)) if exists(path)] == ["cache/digest.py"]


def test_installs_name_our_distribution() -> None:
    """An index has another project of the import name. Extras exist, and a checkout is installed by its pins."""
    project = tomllib.loads(read("pyproject.toml"))["project"]
    assert project["name"] == DISTRIBUTION
    kinds = ("*.py", "*.md", "*.yaml", "*.sh", "Dockerfile", "*.service", "Makefile")
    files = subprocess.run(["git", "ls-files", "--", *kinds], cwd=ROOT, capture_output=True, text=True, check=True)
    found = {name: wrong_installs((ROOT / name).read_text(), project) for name in files.stdout.split()}
    assert {name: lines for name, lines in found.items() if lines} == {}


def wrong_installs(text: str, project: Mapping[str, Any]) -> list[str]:
    """Commands that install a project of another name, an extra that is not there, or a checkout without its pins."""
    wrong = []
    for command in INSTALL.findall(text):
        checkout = re.search(r"-e '?\.", command)
        extras = re.search(r"""(?:tandem-serve|\.|\.whl\)?)\[([\w,]+)\]""", command)
        unknown = {*extras[1].split(",")} - {*project["optional-dependencies"]} if extras else set[str]()
        if ANOTHER.search(command) or unknown or (checkout and "-c constraints.txt" not in command):
            wrong.append(command)
    return wrong


def test_a_wrong_install_is_noticed() -> None:
    project = {"optional-dependencies": {"nixl": []}}
    for command in ("tandem", "'tandem[nixl]'", "'tandem-serve[fast]'", "-e .", "-e '.[nixl]'", "tandem==1"):
        assert wrong_installs(f"x `pip install {command}`.", project), command
    for command in ("tandem-serve", "'tandem-serve[nixl]'", "-c constraints.txt -e '.[nixl]'", "torch ; cd tandem"):
        assert not wrong_installs(f"x pip install {command}", project), command
