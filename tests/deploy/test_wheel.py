"""The wheel: it is built without a compiler, has every file that is not Python, and its command line runs from it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import Distribution, distribution
from pathlib import Path, PurePosixPath
from urllib.request import Request, urlopen

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tandem.cache.extras import DISTRIBUTION
from tests.deploy.known import PROJECT, ROOT, VERSION

FOLDERS = ("cache", "transfer", "workers", "cluster", "proto", "deploy")
ALL = (*FOLDERS, "pyproject.toml", "LICENSE")
SECONDS = 90
DEMO = "cluster/tools/demo_model/"  # 7 MiB, for checkouts alone
C_FILES = sorted(path.stem for folder in FOLDERS for path in (ROOT / folder).rglob("*.c"))


def run(*command: str, **environ: str) -> str:
    ran = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environ, cwd="/", check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def tracked() -> set[str]:
    listed = subprocess.run(["git", "ls-files", *ALL], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {name for name in listed.splitlines() if (ROOT / name).exists() and not name.startswith(DEMO)}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what git tracks, with no compiler on the PATH."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in tracked():
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "source" / name).write_bytes((ROOT / name).read_bytes())
    options = ("--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--wheel-dir", str(folder))
    run(
        sys.executable, "-m", "pip", "wheel", "-q", *options, str(folder / "source"), PATH=str(folder), HOME=str(folder)
    )
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of a new environment: tandem from the wheel, and of the packages here its dependencies."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    (site,) = folder.glob("lib/python*/site-packages")
    options = ("--no-deps", "--no-compile", "--disable-pip-version-check", "--ignore-installed")
    python = str(folder / "bin" / "python")
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", *options, str(wheel), HOME=str(folder))
    link_packages(needed(PROJECT["project"]["dependencies"]), site)
    return folder / "bin"


def needed(requirements: list[str]) -> dict[str, Distribution]:
    """The distributions here that pip would install for these, by name."""
    found: dict[tuple[str, str], Distribution] = {}  # by name and extra
    waiting = [(Requirement(text), "") for text in requirements]
    while waiting:
        one, extra = waiting.pop()
        if one.marker is not None and not one.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(one.name)
        for asked in {"", *one.extras} - {asked for known, asked in found if known == name}:
            found[name, asked] = distribution(name)
            waiting += [(Requirement(text), asked) for text in found[name, asked].requires or ()]
    return {name: one for (name, _), one in found.items()}


def link_packages(distributions: dict[str, Distribution], site: Path) -> None:
    """Puts them into a folder of packages. A folder that several have, as `google` is, has links to files."""
    owners: dict[str, list[Distribution]] = {}
    for one in distributions.values():
        for top in {path.parts[0] for path in one.files or () if path.parts[0] not in ("..", "__pycache__")}:
            owners.setdefault(top, []).append(one)
    for top, several in owners.items():
        if len(several) == 1:
            (site / top).symlink_to(str(several[0].locate_file(top)))
            continue
        for one in several:
            for path in one.files or ():
                if path.parts[0] == top and path.suffix != ".pyc":
                    (site / path).parent.mkdir(parents=True, exist_ok=True)
                    (site / path).symlink_to(str(one.locate_file(path)))


def test_each_file_is_declared_by_its_package() -> None:
    """An undeclared file is missing in the wheel. This needs no build."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    packages = {name.removeprefix("tandem.").replace(".", "/"): name for name in declared["packages"]}
    packages |= {folder: name for name, folder in declared["package-dir"].items()}
    undeclared = set()
    for path in map(PurePosixPath, tracked()):
        package = next((folder for folder in map(str, path.parents) if folder in packages), None)
        if package is None:
            continue
        name, patterns = str(path.relative_to(package)), declared["package-data"].get(packages[package], ())
        is_module = path.suffix == ".py" and "/" not in name
        if not is_module and not any(PurePosixPath(name).match(pattern) for pattern in patterns):
            undeclared.add(str(path))
    assert undeclared == set()


@pytest.mark.long
def test_it_is_for_any_machine(wheel: Path) -> None:
    assert wheel.name == f"{DISTRIBUTION.replace('-', '_')}-{VERSION}-py3-none-any.whl"


@pytest.mark.long
def test_everything_is_inside(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    wanted = {f"tandem/{name}" for name in tracked() if name.startswith(tuple(f"{folder}/" for folder in FOLDERS))}
    elsewhere = {"tandem/proto/generate.py", "tandem/cluster/toplevel/__init__.py", "tandem/cluster/toplevel/py.typed"}
    assert wanted - inside - elsewhere == set()
    assert "tandem/__init__.py" in inside
    assert "tandem/py.typed" in inside
    assert not any(name.endswith(".safetensors") for name in inside)
    for kind in (".cu", ".cuh", ".c", ".h", ".proto", ".pyi"):
        assert any(name.endswith(kind) for name in inside), kind
    assert "tandem/deploy/grafana/tandem.json" in inside


@pytest.mark.long
def test_the_command_runs_from_it(installed: Path) -> None:
    tandem = str(installed / "tandem")
    environ = {"PATH": os.environ["PATH"], "HOME": str(installed)}
    assert run(tandem, "--version", **environ) == f"tandem {VERSION}\n"
    assert "--max-tokens" in run(tandem, "generate", "--help", **environ)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_kernels_compile_from_it(installed: Path) -> None:
    environ = {"PATH": os.environ["PATH"], "HOME": str(installed), "TANDEM_KERNEL_CACHE": str(installed / "kernels")}
    package = Path(run(str(installed / "python"), "-c", "import tandem.cluster as one; print(one.__file__)", **environ))
    site = package.parents[2]
    assert site.is_relative_to(installed.parent)
    model = ROOT / DEMO / "checkpoint"
    config = site / "tandem/deploy/local.yaml"
    words = ("build-kernels", str(config), "--model", str(model), "--set", "island.decode_ranks=2")
    run(str(installed / "tandem"), *words, **environ)
    assert sorted(path.stem.partition("-")[0] for path in (installed / "kernels").glob("*.so")) == C_FILES


@pytest.mark.long
def test_it_serves_by_its_dependencies_alone(installed: Path, tmp_path: Path) -> None:
    """Outside the checkout, without the tools of development."""
    for package in ("transformers", "pytest", "httpx"):
        assert not list(installed.parent.glob(f"lib/python*/site-packages/{package}")), "a tool, and no dependency"
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    tandem, model, config = str(installed / "tandem"), tmp_path / "model", tmp_path / "empty.yaml"
    run(tandem, "make-model", str(model), **environ)
    config.touch()
    words = ("up", str(config), "--model", str(model), "--grpc-port", "0", "--http-port", "0")
    with started([tandem, *words], environ) as ready:
        http = next(word.removeprefix("http=") for word in ready.split() if word.startswith("http="))
        asked = json.dumps({"prompt": [1, 2, 3], "max_tokens": 4}).encode()
        headers = {"content-type": "application/json"}
        with urlopen(Request(f"http://{http}/v1/completions", asked, headers), timeout=SECONDS) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 4
        assert json.loads(run(tandem, "generate", "--token-ids", "1,2,3", "--json", **environ))["usage"]


@contextmanager
def started(command: list[str], environ: dict[str, str]) -> Iterator[str]:
    """The line that says where a cluster serves. It is stopped at the end."""
    with subprocess.Popen(command, env=environ, cwd="/", stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline()
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(SECONDS)
        assert process.returncode == 0


@pytest.mark.long
def test_type_checkers_see_its_types(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "use.py").write_text(
        "import tandem\n"
        "with tandem.launch(model='DIR') as llm:\n"
        "    for output in llm.generate(['a'], max_tokens='x'):\n"
        "        reveal_type(output.text)\n"
        "    llm.generate(['a'], max_tokens=3)\n"
    )
    command = [sys.executable, "-m", "pyright", "--pythonpath", str(installed / "python"), "--outputjson", "use.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS, check=False)
    findings = json.loads(done.stdout)["generalDiagnostics"]
    assert [one["range"]["start"]["line"] for one in findings if one["severity"] == "error"] == [2]
    assert [one["message"] for one in findings if one["severity"] == "information"] == [
        'Type of "output.text" is "str"'
    ]
