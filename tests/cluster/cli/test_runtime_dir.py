import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.cluster.cli.runtime_dir import ClusterLock, running_cluster, running_clusters, runtime_dir
from tandem.cluster.errors import ClusterRunning, RuntimeDirError

HOLDER = """
import sys
from tandem.cluster.cli.runtime_dir import ClusterLock
lock = ClusterLock("other")
lock.publish("127.0.0.1:1234", {})
print("held", flush=True)
sys.stdin.read()
"""


def holder() -> subprocess.Popen[str]:
    """A process that holds the cluster name `other` until its stdin closes."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_lock_is_seen_while_it_is_held(runtime_folder: Path) -> None:
    assert running_cluster("mine") is None
    with ClusterLock("mine") as lock:
        state = running_cluster("mine")
        assert state is not None
        assert (state.name, state.pid, state.grpc_address) == ("mine", os.getpid(), None)
        lock.publish("127.0.0.1:5", {"ray": 1.5})
        assert [(s.grpc_address, s.start_seconds) for s in running_clusters()] == [("127.0.0.1:5", {"ray": 1.5})]
    lock.release()
    assert running_clusters() == ()
    assert list(runtime_folder.iterdir()) == []


def test_a_second_lock_names_pid_and_address(runtime_folder: Path) -> None:
    process = holder()
    try:
        with pytest.raises(ClusterRunning, match=rf"'other'.*pid {process.pid}.*grpc=127\.0\.0\.1:1234"):
            ClusterLock("other")
        with ClusterLock("mine"):
            assert [state.name for state in running_clusters()] == ["mine", "other"]
    finally:
        process.communicate("", timeout=10)
    assert running_cluster("other") is None


def test_a_killed_holder_gives_the_name_back(runtime_folder: Path) -> None:
    process = holder()
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=10)
    assert (runtime_folder / "other.cluster").exists()
    assert running_cluster("other") is None
    with ClusterLock("other") as lock:
        lock.publish("127.0.0.1:6", {})
        state = running_cluster("other")
        assert state is not None
        assert (state.pid, state.grpc_address) == (os.getpid(), "127.0.0.1:6")


def test_programs_started_by_the_holder_do_not_keep_the_lock(runtime_folder: Path) -> None:
    lock = ClusterLock("mine")
    child = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE, close_fds=False
    )
    try:
        lock.release()
        ClusterLock("mine").release()
    finally:
        child.communicate(b"", timeout=10)


def test_a_released_lock_publishes_nothing(runtime_folder: Path) -> None:
    lock = ClusterLock("mine")
    lock.release()
    with pytest.raises(RuntimeError, match="released"):
        lock.publish("127.0.0.1:5", {})


def test_the_folder_is_private(runtime_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert runtime_dir() == runtime_folder
    assert runtime_folder.stat().st_mode & 0o777 == 0o700
    runtime_folder.chmod(0o755)
    with pytest.raises(RuntimeDirError, match="mode 700"):
        runtime_dir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime_folder / "absent"))
    with pytest.raises(RuntimeDirError, match="cannot be made"):
        runtime_dir()


def test_without_xdg_it_lies_in_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert runtime_dir() == tmp_path / f"tandem-{os.getuid()}"


def test_a_link_in_its_place_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "tandem").symlink_to(tmp_path / "real")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(RuntimeDirError, match="must be a folder"):
        runtime_dir()
