"""Processes forked from one with all imports: calls, errors and ends, whichever of them goes first."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from tandem.cluster.errors import ProcessEnded, StartFailed
from tandem.cluster.processes.actor_server import pack
from tandem.cluster.processes.fork_server import ForkServer
from tandem.cluster.processes.forked_actor import ForkedActor
from tests.support.waiting import until

SECONDS = 60.0
ROOT = Path(__file__).resolve().parents[3]


class Unreadable(Exception):
    """Cannot be made from its arguments, as some errors of libraries cannot."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)


class Actor:
    def __init__(self, word: str) -> None:
        if word == "wrong":
            raise ValueError("word is 'wrong'; any other is accepted")
        self._word = word
        self._released = threading.Event()

    def say(self, *words: str) -> tuple[str, ...]:
        return (self._word, *words)

    def fail(self, error: Exception) -> None:
        raise error

    def fail_unreadably(self) -> None:
        raise Unreadable("one", "two")

    def wait(self) -> None:
        self._released.wait()

    def release(self) -> None:
        self._released.set()

    def exit(self, code: int) -> None:
        os._exit(code)

    def parent(self) -> int:
        return os.getppid()

    def imported(self, module: str) -> bool:
        return module in sys.modules

    def triton_has_hashed_itself(self) -> bool:
        from triton.runtime.cache import triton_key

        return triton_key.cache_info().currsize == 1


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer(["wave", "there_is_no_such_module", __name__])
    yield server
    server.close()


def fork(server: ForkServer, word: str = "a") -> ForkedActor:
    return server.fork("c/worker", pack((Actor, word)), SECONDS)


def ended(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_calls_run_side_by_side_in_processes_of_their_own(server: ForkServer) -> None:
    first, second = fork(server, "a"), fork(server, "b")
    waiting = first.call("wait")
    assert first.call("say", "x").result(SECONDS) == ("a", "x")
    assert second.call("say", "x", "y").result(SECONDS) == ("b", "x", "y")
    assert not waiting.done()
    first.call("release").result(SECONDS)
    waiting.result(SECONDS)
    for actor in (first, second):
        assert actor.call("parent").result(SECONDS) == server.pid
        assert Path(f"/proc/{actor.pid}/comm").read_text() == "worker\n"
        assert actor.call("imported", "wave").result(SECONDS)
        actor.kill()


def test_errors_travel(server: ForkServer) -> None:
    actor = fork(server)
    with pytest.raises(ProcessEnded, match="other ended: so it is") as raised:
        actor.call("fail", ProcessEnded("other", "so it is")).result(SECONDS)
    assert raised.value.name == "other"
    with pytest.raises(RuntimeError, match="Unreadable: one"):
        actor.call("fail_unreadably").result(SECONDS)
    with pytest.raises(AttributeError, match="sing"):
        actor.call("sing").result(SECONDS)
    assert actor.call("say").result(SECONDS) == ("a",)
    actor.kill()


def test_a_constructor_that_fails_ends_its_process(server: ForkServer) -> None:
    actor = fork(server, "wrong")
    with pytest.raises(ProcessEnded, match="word is 'wrong'; any other is accepted"):
        actor.call("wait").result(SECONDS)
    assert actor.join(SECONDS)
    until(lambda: ended(actor.pid))  # the server reaps it


@pytest.mark.parametrize("stopped", [False, True])
def test_the_killed_are_gone_and_their_calls_told(server: ForkServer, stopped: bool) -> None:
    actor, other = fork(server), fork(server)
    waiting: Future[None] = actor.call("wait")
    actor.call("say").result(SECONDS)
    if stopped:
        os.kill(actor.pid, signal.SIGSTOP)
    actor.kill()
    with pytest.raises(ProcessEnded, match="c/worker ended: its process was ended by SIGKILL"):
        waiting.result(SECONDS)
    assert actor.join(SECONDS)
    until(lambda: ended(actor.pid))  # the server reaps it
    actor.kill()
    with pytest.raises(ProcessEnded, match="SIGKILL"):
        actor.call("say").result(SECONDS)
    assert other.call("say").result(SECONDS) == ("a",)
    other.kill()


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (lambda actor: actor.call("exit", 3), "its process ended with exit code 3"),
        (lambda actor: os.kill(actor.pid, signal.SIGSEGV), "its process was ended by SIGSEGV"),
        (
            lambda actor: os.kill(actor.pid, signal.SIGRTMIN + 1),
            f"its process was ended by signal {signal.SIGRTMIN + 1}",
        ),
    ],
    ids=["exit", "segmentation fault", "nameless"],
)
def test_errors_say_how_a_process_ended(server: ForkServer, end: Callable[[ForkedActor], object], reason: str) -> None:
    actor, other = fork(server), fork(server)
    waiting = actor.call("wait")
    actor.call("say").result(SECONDS)
    end(actor)
    for answer in (waiting, actor.call("say")):
        with pytest.raises(ProcessEnded, match=reason):
            answer.result(SECONDS)
    other.kill()


DRIVER = """
int cuDeviceGetCount(int *count) { return %d; }
"""


@pytest.mark.parametrize(("result", "kept"), [(3, True), (0, False)])
def test_what_touches_a_gpu_is_not_imported(
    result: int, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver's library of our own, which says whether it was initialised."""
    library = tmp_path / "driver.so"
    build = ["cc", "-shared", "-Wl,-soname,libcuda.so.1", "-o", str(library), "-xc", "-"]
    subprocess.run(build, input=DRIVER % result, text=True, check=True, timeout=SECONDS)
    (tmp_path / "touches_gpu.py").write_text(
        f"import ctypes\n\ndef load():\n    global driver\n    driver = ctypes.CDLL({str(library)!r})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    server = ForkServer(["touches_gpu:load"])
    actor = fork(server)
    assert actor.call("imported", "touches_gpu").result(SECONDS) == kept
    assert actor.call("parent").result(SECONDS) == server.pid
    server.close()


def test_triton_has_hashed_itself_before_a_fork() -> None:
    pytest.importorskip("triton")
    server = ForkServer(["tandem.cache.kernels.preload:preload_triton", __name__])
    actor = fork(server)
    assert actor.call("triton_has_hashed_itself").result(SECONDS)
    server.close()


def test_actors_end_with_their_server() -> None:
    server = ForkServer([])
    actor = fork(server)
    waiting = actor.call("wait")
    os.kill(server.pid, signal.SIGKILL)
    with pytest.raises(ProcessEnded):
        waiting.result(SECONDS)
    until(lambda: ended(actor.pid))
    with pytest.raises(StartFailed, match="c/worker cannot be started"):
        fork(server)
    server.close()
    server.close()


def test_a_server_that_hangs_in_its_imports_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "endless_import.py").write_text("import time\ntime.sleep(1000)\n")
    monkeypatch.syspath_prepend(tmp_path)
    server = ForkServer(["endless_import"])
    with pytest.raises(StartFailed, match=r"within 0\.3 s"):
        server.fork("c/worker", pack((Actor, "a")), 0.3)
    server.close()
    assert ended(server.pid)


def test_all_end_with_the_process_that_asked_for_them() -> None:
    script = (
        "from tests.cluster.processes.test_fork_server import ForkServer, fork\n"
        "server = ForkServer([]); actor = fork(server); actor.call('say').result(60)\n"
        "print(server.pid, actor.pid, flush=True); actor.call('wait').result()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.kill()
    until(lambda: all(ended(pid) for pid in pids))
