"""The wheel: it is built without a compiler, has every file that is not Python, and its command line runs from it."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path, PurePosixPath

import pytest

from tandem.cache.extras import DISTRIBUTION
from tests.deploy.known import ROOT, VERSION

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
    """The folder of programs of a new environment, in which tandem comes from the wheel and the rest from here."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    (site,) = folder.glob("lib/python*/site-packages")
    options = ("--no-deps", "--no-compile", "--disable-pip-version-check", "--ignore-installed")
    python = str(folder / "bin" / "python")
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", *options, str(wheel), HOME=str(folder))
    beside = next(path for path in sys.path if (Path(path) / "torch").is_dir())
    (site / "beside.pth").write_text(f"{beside}\n")
    return folder / "bin"


def test_each_file_is_declared_by_its_package() -> None:
    """What is not is missing in the wheel. This needs no build."""
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
