"""Tests what `tandem` tells an operator whose host or command is not right, each through the command line.

`python -m tests.e2e.test_operator` prints a table of what is said, within how many seconds.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tandem.cache.kernels.build.nvml import read_driver
from tandem.cluster.cli.commands import main as tandem
from tandem.cluster.cli.runtime_dir import ClusterLock
from tandem.cluster.tools.random_checkpoint import make_checkpoint

ROOT = Path(__file__).resolve().parents[2]
LOCAL = ("up", "deploy/local.yaml", "--grpc-port", "0")
MOUNTS = os.geteuid() == 0 and shutil.which("unshare") is not None
NEEDS_MOUNTS = "needs root, for a mount that only the command sees"


@dataclass(frozen=True)
class Place:
    """The place where a case runs: a model's folder, and a folder of its own."""

    model: Path
    folder: Path


@dataclass(frozen=True)
class Command:
    """A command line with its surroundings. before: shell commands that change the host for it alone."""

    arguments: tuple[str, ...]
    before: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[Place], Command]
    code: int
    words: tuple[str, ...]  # on stderr
    needs: str = ""  # NEEDS_MOUNTS, or why it is skipped


def _full(size: str, folder: Path) -> str:
    """Puts a file system of that size in place of a folder, for one command."""
    return f"mount -t tmpfs -o size={size} tmpfs {folder} && "


def _up(place: Place, *arguments: str, before: str = "", **environ: str) -> Command:
    return Command((*LOCAL, "--model", str(place.model), *arguments), before, environ)


CASES = (
    Case(
        "a GPU config on a host without one",
        lambda place: Command(("up", "deploy/gpu-1p1d.yaml", "--model", str(place.model))),
        2,
        ("island.device is cuda and the workers need 2 GPUs; this host has no GPU", "deploy/local.yaml runs here"),
        "this host has a GPU" if read_driver().gpus else "",
    ),
    Case(
        "no such model",
        lambda place: Command((*LOCAL, "--model", str(place.folder / "none"))),
        2,
        ("model.path is", "there is no such folder"),
    ),
    Case(
        "a hub id that is not in the cache",
        lambda place: Command((*LOCAL, "--model", "Nobody/nothing-1b"), environ={"HF_HUB_CACHE": str(place.folder)}),
        2,
        ("`hf download Nobody/nothing-1b`",),
    ),
    Case(
        "a folder that is no checkpoint",
        lambda place: Command((*LOCAL, "--model", str(place.folder))),
        2,
        ("which has no config.json",),
    ),
    Case(
        "a wrong key",
        lambda place: _up(place, TANDEM_GATEWAY__PROT="1"),
        2,
        ("TANDEM_GATEWAY__PROT: unknown key gateway.prot; did you mean gateway.port?",),
    ),
    Case("no model", lambda place: Command(LOCAL), 2, ("model.path is null", "give --model")),
    Case("a taken name", lambda place: _up(place, "--set", "name=taken"), 1, ("a cluster of that name runs with pid",)),
    Case(
        "a taken port",
        lambda place: _up(place, "--grpc-port", (place.folder / "port").read_text()),
        1,
        ("gateway.port", "cannot be opened (Address already in use)", "--grpc-port"),
    ),
    Case(
        "a low file limit",
        lambda place: _up(place, before="ulimit -n 400 && "),
        1,
        ("the limit of open files is 400; at least 1024 are needed", "ulimit -n 65536"),
    ),
    Case(
        "a full disk, where Ray keeps its files",
        lambda place: _up(place, before=_full("4m", place.folder / "disk"), RAY_TMPDIR=str(place.folder / "disk")),
        1,
        ("has 4 MiB free; at least 256 are needed", "RAY_TMPDIR"),
        NEEDS_MOUNTS,
    ),
    Case(
        "a full disk, where running clusters are noted",
        lambda place: _up(
            place,
            before=_full("64k,mode=700", place.folder / "disk") + f"mkdir -m 700 {place.folder}/disk/tandem && "
            f"(cat /dev/zero > {place.folder}/disk/filler 2> /dev/null; true) && ",
            XDG_RUNTIME_DIR=str(place.folder / "disk"),
        ),
        1,
        ("cannot be written: No space left on device", "XDG_RUNTIME_DIR moves it"),
        NEEDS_MOUNTS,
    ),
    Case(
        "a full disk, where logs go",
        lambda place: _up(
            place, "--set", f"logging.folder={place.folder}/disk/logs", before=_full("4m", place.folder / "disk")
        ),
        1,
        ("logging.folder: ", "/disk/logs has 4 MiB free; at least 64 are needed: set logging.folder to another one"),
        NEEDS_MOUNTS,
    ),
    Case("status of a cluster that does not run", lambda place: Command(("status", "nope")), 1, ("'nope'", "running:")),
)


@dataclass(frozen=True)
class Said:
    code: int
    stderr: str
    seconds: float


def run(command: Command, apart: bool) -> Said:
    """Runs the command as a process. apart: with mounts that only the command sees."""
    line = f"{command.before}exec {sys.executable} -m tandem.cluster.cli " + " ".join(command.arguments)
    began = time.monotonic()
    done = subprocess.run(
        [*(("unshare", "--mount") if apart else ()), "sh", "-c", line],
        cwd=ROOT,
        env={"PYTHONPATH": os.pathsep.join(sys.path), **os.environ, **command.environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return Said(done.returncode, done.stderr, time.monotonic() - began)


@contextmanager
def place_in(folder: Path) -> Iterator[Place]:
    """Yields a model, a cluster named `taken`, and a port on which another program listens."""
    make_checkpoint(folder / "model")
    (folder / "disk").mkdir()
    with ExitStack() as held:
        held.enter_context(ClusterLock("taken"))
        listener = held.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        (folder / "port").write_text(str(listener.getsockname()[1]))
        yield Place(folder / "model", folder)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("operator")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        patch.chdir(ROOT)
        with place_in(folder) as made:
            yield made


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_operator_is_told(case: Case, place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    if case.needs and not (case.needs == NEEDS_MOUNTS and MOUNTS):
        pytest.skip(case.needs)
    command = case.make(place)
    if command.before or command.environ:
        said = run(command, case.needs == NEEDS_MOUNTS)
    else:  # here, for what a process imports takes seconds
        with pytest.raises(SystemExit) as ended:
            tandem(command.arguments)
        said = Said(int(ended.value.code or 0), capsys.readouterr().err, 0.0)
    assert said.code == case.code, said.stderr
    error = said.stderr.splitlines()[-1]
    assert error.startswith("tandem: ")
    assert "Traceback" not in said.stderr
    assert all(word in error for word in case.words), error


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_RUNTIME_DIR"] = folder
        with place_in(Path(folder)) as place:
            print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
            for case in CASES:
                said = run(case.make(place), case.needs == NEEDS_MOUNTS)
                print(f"{said.seconds:5.2f} s  exit {said.code}  {case.name}: {said.stderr.splitlines()[-1]}")


if __name__ == "__main__":
    main()
