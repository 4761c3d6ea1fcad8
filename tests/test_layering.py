"""Who may import whom: read from the sources, so that imports inside functions count too."""

import ast
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ORDER: tuple[str, ...] = ("cache", "transfer", "workers", "cluster")  # each may import those before it
PACKAGES = (*ORDER, "proto")
GENERATED = ("_pb2.py", "_pb2_grpc.py")
MAX_LINES = 400

# Heavy dependencies and the files that are their home.
HOMES = {
    "ray": {"cluster/ray_processes.py"},
    "uvicorn": {"cluster/http_door.py"},
    "grpc": {
        "cluster/admin.py",
        "cluster/announcements.py",
        "cluster/token_feed.py",
        "cluster/attempts.py",
        "cluster/client.py",
        "cluster/client_messages.py",
        "cluster/gateway.py",
        "cluster/generation.py",
        "cluster/grpc_door.py",
        "cluster/intake.py",
        "cluster/ray_address.py",
        "cluster/resumption.py",
        "cluster/router.py",
        "cluster/worker_link.py",
        "cluster/credentials.py",
        "workers/authentication.py",
        "workers/service.py",
        "workers/well_formed.py",
        "workers/worker.py",
    },
}
ONE_HOME = ("flashinfer", "nvshmem")
REFUSED = ("pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib")


def sources() -> list[str]:
    """The packages' files that a person wrote, relative to the root."""
    found = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return sorted(str(path.relative_to(ROOT)) for path in found if not path.name.endswith(GENERATED))


@cache
def imports(file: str) -> frozenset[str]:
    """Dotted names that the file imports, also inside functions; `from a import b` gives a.b."""
    names: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: a relative import"
            names.update(f"{node.module}.{name.name}" for name in node.names)
    return frozenset(names)


def importers(module: str) -> set[str]:
    return {file for file in sources() if any(name.split(".")[0] == module for name in imports(file))}


def test_there_are_sources() -> None:
    assert {file.split("/")[0] for file in sources()} == set(PACKAGES)


@pytest.mark.parametrize("file", sources())
def test_imports_point_one_way(file: str) -> None:
    package = file.split("/")[0]
    allowed = {"proto"} if package == "proto" else set(ORDER[: ORDER.index(package) + 1])
    if package in ("workers", "cluster"):
        allowed.add("proto")
    wrong = {name for name in imports(file) if name.startswith("tandem.") and name.split(".")[1] not in allowed}
    assert not wrong, f"{file} may import {sorted(allowed)} of tandem"


@pytest.mark.parametrize("package", PACKAGES)
def test_no_bare_import_of_our_packages(package: str) -> None:
    tests = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py")}
    bare = {file for file in tests if any(name.split(".")[0] == package for name in imports(file))}
    assert not importers(package) | bare


@pytest.mark.parametrize("module", HOMES)
def test_heavy_dependencies_stay_at_home(module: str) -> None:
    assert importers(module) <= HOMES[module]


@pytest.mark.parametrize("module", ONE_HOME)
def test_accelerator_libraries_have_one_home(module: str) -> None:
    assert len(importers(module)) <= 1


@pytest.mark.parametrize("module", REFUSED)
def test_nothing_unpickles(module: str) -> None:
    assert not importers(module)


@pytest.mark.parametrize("file", sources())
def test_files_are_short(file: str) -> None:
    assert len((ROOT / file).read_text(encoding="utf-8").splitlines()) <= MAX_LINES


def test_everything_is_installed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    packages = {f"tandem.{Path(file).parent}".replace("/", ".") for file in sources()}
    assert set(listed["packages"]) == packages
    for package in packages:
        folder = ROOT / package.removeprefix("tandem.").replace(".", "/")
        for path in folder.iterdir():
            patterns = ("*.py", *listed["package-data"].get(package, ()))
            assert path.is_dir() or any(path.match(pattern) for pattern in patterns), f"{path} is in no wheel"


def test_import_touches_no_device_and_starts_no_thread() -> None:
    elsewhere = importers("nvshmem")
    modules = [
        f"tandem.{file.removesuffix('.py').replace('/', '.').removesuffix('.__init__')}"
        for file in sources()
        if file.startswith(("cache/", "transfer/", "workers/")) and file not in elsewhere
    ]
    script = "\n".join(
        [
            "import importlib, threading, torch",
            "threads = threading.active_count()",
            f"for module in {modules!r}: importlib.import_module(module)",
            "assert not torch.cuda.is_initialized(), 'CUDA is initialised'",
            "assert threading.active_count() == threads, 'a thread was started'",
        ]
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
