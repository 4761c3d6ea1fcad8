"""Who may import whom: read from the sources, so that imports inside functions count too."""

import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from tests.support.import_graph import floors, imports, modules, rooms, sources

pytestmark = pytest.mark.check

ROOT = Path(__file__).resolve().parent.parent
ORDER: tuple[str, ...] = ("cache", "transfer", "workers", "cluster")  # each may import those before it
PACKAGES = (*ORDER, "proto")
MAX_LINES = 400
MAX_MODULES = 20  # beside each other in a package

# Packages of each folder, and modules beside them, by the floor they stand on: each may import those of lower floors.
FLOORS = {
    "cache": (
        {"plan", "extras"},
        {"kernels"},
        {"kinds", "store"},
        {"pages"},
        {"attention"},
        {"operations"},
        {"paged_cache"},
        {"digest"},
    ),
    "workers": (
        {"checkpoint", "counters", "errors", "event_loop", "logs"},
        {"config", "ports", "sampling"},
        {"kernels", "wire"},
        {"requests", "weights"},
        {"ranks"},
        {"models"},
        {"adapters"},
        {"runner"},
        {"scheduling"},
        {"engine"},
        {"handoff", "replay", "speculation"},
        {"decode", "following", "pool_pages", "prefill"},
        {"steps"},
        {"service"},
        {"worker"},
    ),
    "cluster": (
        {"errors", "scaling", "text"},
        {"adapters", "credentials", "peers", "protocol"},
        {"client", "keys", "processes"},
        {"routing"},
        {"config", "requests"},
        {"metrics", "served_model", "tracing"},
        {"frontends"},
        {"gateway"},
        {"supervision"},
        {"tools"},
        {"cli"},
        {"llm"},
        {"toplevel"},
    ),
}

# Heavy dependencies and the files that are their home.
HOMES = {
    "cryptography": {"cluster/supervision/authority.py"},
    "ray": {
        "cluster/processes/own_ray.py",
        "cluster/processes/ray_group.py",
        "cluster/processes/ray_nodes.py",
        "cluster/processes/ray_processes.py",
    },
    "h11": {
        "cluster/tools/bench/event_streams.py",
        "cluster/frontends/http/connection.py",
        "cluster/frontends/http/strict_http.py",
    },
    "llguidance": {"workers/sampling/guided.py", "workers/sampling/thinking.py"},
    "matplotlib": {"cluster/tools/bench/report.py"},
    "opentelemetry": {"cluster/tracing/exporter.py"},
    "uvicorn": {"cluster/frontends/http/connection.py", "cluster/frontends/http/server.py"},
    "prometheus_client": {
        "cluster/cli/samples.py",
        "cluster/metrics/cells.py",
        "cluster/metrics/cluster_series.py",
        "cluster/metrics/key_series.py",
        "cluster/metrics/scrape.py",
    },
    "grpc": {
        "cluster/client/client.py",
        "cluster/client/client_messages.py",
        "cluster/client/resumption.py",
        "cluster/credentials.py",
        "cluster/frontends/admin.py",
        "cluster/frontends/grpc_access.py",
        "cluster/frontends/grpc_server.py",
        "cluster/frontends/inference.py",
        "cluster/frontends/reflection.py",
        "cluster/gateway/gateway.py",
        "cluster/peers/claims.py",
        "cluster/peers/links.py",
        "cluster/peers/peer_server.py",
        "cluster/processes/ray_access.py",
        "cluster/routing/worker_link.py",
        "cluster/errors/statuses.py",
        "workers/ports/authentication.py",
        "workers/service/services.py",
        "workers/ports/ended_calls.py",
        "workers/ports/guarded_port.py",
        "workers/ports/private_socket.py",
        "workers/service/status.py",
        "workers/service/well_formed.py",
        "workers/ports/tls.py",
        "workers/worker.py",
    },
}
ONE_HOME = ("flashinfer", "nixl", "nvshmem")
REFUSED = ("pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib")


def importers(module: str) -> set[str]:
    return {file for file in sources() if any(name.split(".")[0] == module for name in imports(file))}


def tandem_imports(file: str) -> set[str]:
    return {name for name in imports(file) if name.startswith("tandem.")}


def test_there_are_sources() -> None:
    assert {file.split("/")[0] for file in sources()} == set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_one_way(package: str) -> None:
    allowed = {"proto"} if package == "proto" else set(ORDER[: ORDER.index(package) + 1])
    if package in ("workers", "cluster"):
        allowed |= {"proto", "__version__"}
    wrong = {
        file: names
        for file in sources()
        if file.startswith(f"{package}/")
        and (names := {name for name in tandem_imports(file) if name.split(".")[1] not in allowed})
    }
    assert wrong == {}, f"{package} may import {sorted(allowed)} of tandem"


@pytest.mark.parametrize("folder", FLOORS)
def test_packages_of_a_folder_import_only_lower_floors(folder: str) -> None:
    found = floors(rooms(folder))  # CycleError where packages import each other in a circle
    assert {room: floor for floor, names in enumerate(FLOORS[folder], 1) for room in names} == found


def test_no_files_import_each_other() -> None:
    """Nor in a longer circle, under TYPE_CHECKING or within functions."""
    floors(modules())  # CycleError names them


def test_no_package_is_crowded() -> None:
    modules = Counter(str(Path(file).parent) for file in sources() if not file.endswith("__init__.py"))
    assert {package: count for package, count in modules.items() if count > MAX_MODULES} == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_bare_import_of_our_packages(package: str) -> None:
    tests = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py")}
    bare = {file for file in tests if any(name.split(".")[0] == package for name in imports(file))}
    assert not importers(package) | bare


@pytest.mark.parametrize("module", HOMES)
def test_heavy_dependencies_stay_at_home(module: str) -> None:
    assert importers(module) <= HOMES[module]


def test_a_gateway_starts_without_torch() -> None:
    """Which takes longer to import than all the rest of it."""
    program = "import sys, tandem.cluster.supervision.gateway_actor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize("module", ONE_HOME)
def test_accelerator_libraries_have_one_home(module: str) -> None:
    assert len(importers(module)) <= 1


@pytest.mark.parametrize("module", REFUSED)
def test_nothing_unpickles(module: str) -> None:
    assert not importers(module)


def test_files_are_short() -> None:
    lines = {file: len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in sources()}
    assert {file: count for file, count in lines.items() if count > MAX_LINES} == {}


def test_everything_is_installed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    packages = {f"tandem.{Path(file).parent}".replace("/", ".") for file in sources()} | {"tandem.deploy"}
    packages.remove("tandem.cluster.toplevel")
    assert set(listed["packages"]) == packages | {"tandem"}
    assert listed["package-dir"]["tandem"] == "cluster/toplevel"
    for package in packages:
        folder = ROOT / package.removeprefix("tandem.").replace(".", "/")
        for path in folder.iterdir():
            patterns = ("*.py", *listed["package-data"].get(package, ()))
            assert path.is_dir() or any(path.match(pattern) for pattern in patterns), f"{path} is in no wheel"


def test_import_touches_no_device_and_starts_no_thread() -> None:
    elsewhere = importers("nvshmem") | importers("nixl")
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
