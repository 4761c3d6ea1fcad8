"""Processes forked from one with all imports: calls, errors and ends, whichever of them goes first."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from multiprocessing.connection import Pipe
from pathlib import Path

import pytest

from tandem.cluster.errors import ProcessEnded, StartFailed
from tandem.cluster.processes import process_tree
from tandem.cluster.processes.forks import fork_server, forked_actor
from tandem.cluster.processes.forks.actor_server import pack
from tandem.cluster.processes.forks.fork_server import ForkServer
from tandem.cluster.processes.forks.forked_actor import STATUS_BYTES, ForkedActor
from tandem.cluster.processes.forks.forked_process import forked_by
from tests.chaos.launched import titled
from tests.support.waiting import until

SECONDS = 60.0
ROOT = Path(__file__).resolve().parents[4]


class Unreadable(Exception):
    """Cannot be made from its arguments, as some errors of libraries cannot."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)


class Actor:
    def __init__(self, word: str) -> None:
        if word == "wrong":
            raise ValueError("word is 'wrong'; it must be another")
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

    def describe(self) -> None:
        here = os.getpriority(os.PRIO_PROCESS, 0), Path("/proc/self/oom_score_adj").read_text().strip(), forked_by()
        print(os.environ["CUDA_VISIBLE_DEVICES"], os.getcwd(), *here, flush=True)
        print("to stderr", file=sys.stderr, flush=True)

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


def children(pid: int) -> set[int]:
    return {child for child, _ in process_tree.children(pid)}


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
    with pytest.raises(ProcessEnded, match="word is 'wrong'; it must be another"):
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
    with pytest.raises(ProcessEnded, match=r"c/worker ended: its process was ended by SIGKILL$"):
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


def test_a_server_that_waits_for_a_core_is_not_said_to_have_ended() -> None:
    """It has reaped the process, and writes how that ended more than a second later."""
    (status, end), (read, lifeline), (pipe, theirs) = os.pipe(), os.pipe(), Pipe()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    actor = ForkedActor("c/worker", process.pid, os.pidfd_open(process.pid), status, pipe, b"", lifeline)
    process.kill()
    process.communicate()
    answer = actor.call("ping")
    theirs.close()
    time.sleep(1.2)
    os.write(end, signal.SIGKILL.to_bytes(STATUS_BYTES, "little"))
    with pytest.raises(ProcessEnded, match=r"its process was ended by SIGKILL$"):
        answer.result(10)
    for descriptor in (end, read):
        os.close(descriptor)


def test_memory_is_named_where_the_kernel_has_ended_processes_for_want_of_it(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = [3]
    monkeypatch.setattr(forked_actor, "_killed_for_memory", lambda: killed[0])
    actor = fork(server)
    killed[0] = 5
    waiting = actor.call("wait")
    actor.call("say").result(SECONDS)
    actor.kill()
    with pytest.raises(ProcessEnded, match="SIGKILL; meanwhile the kernel ended 2 on this machine for want of memory"):
        waiting.result(SECONDS)


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


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Returns how often the module `counted_import` was imported."""
    (tmp_path / "counted_import.py").write_text(
        f"import os, pathlib\n(pathlib.Path({str(tmp_path)!r}) / f'by-{{os.getpid()}}').touch()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return lambda: len(list(tmp_path.glob("by-*")))


def test_when_a_server_is_killed_its_actors_live_and_its_spare_forks_without_imports(
    counted: Callable[[], int],
) -> None:
    server = ForkServer(["counted_import", __name__])
    actor = fork(server)
    assert actor.call("say").result(SECONDS) == ("a",)
    for _ in range(5):  # each spare has one of its own
        first = server.pid
        os.kill(first, signal.SIGKILL)
        other = fork(server, "b")
        assert other.call("parent").result(SECONDS) != first
        assert other.call("imported", "counted_import").result(SECONDS)
        until(lambda before=first: server.pid not in (before, 0))
    assert actor.call("say").result(SECONDS) == ("a",)
    assert counted() == 1
    server.close()


def test_when_server_and_spare_are_killed_another_is_there_unasked(counted: Callable[[], int]) -> None:
    server = ForkServer(["counted_import", __name__])
    actor, before = fork(server), server.pid
    (spare,) = [pid for pid in children(before) if pid != actor.pid]
    os.kill(spare, signal.SIGSTOP)  # it does not take over
    os.kill(before, signal.SIGKILL)
    os.kill(spare, signal.SIGKILL)
    until(lambda: counted() == 2)
    assert fork(server, "b").call("say").result(SECONDS) == ("b",)
    assert actor.call("say").result(SECONDS) == ("a",)
    server.close()


def test_a_killed_spare_is_replaced() -> None:
    server = ForkServer([__name__])
    until(lambda: len(children(server.pid)) == 1)
    (spare,) = children(server.pid)
    os.kill(spare, signal.SIGKILL)
    until(lambda: len(children(server.pid) - {spare}) == 1 and ended(spare))
    os.kill(server.pid, signal.SIGKILL)
    assert fork(server).call("say").result(SECONDS) == ("a",)
    server.close()


def test_a_server_that_is_stopped_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "ANSWER_SECONDS", 0.2)
    server = ForkServer([__name__])
    before = server.pid
    os.kill(before, signal.SIGSTOP)
    assert fork(server).call("say").result(SECONDS) == ("a",)
    until(lambda: ended(before))
    server.close()


def test_clients_of_one_address_share_a_server_which_ends_with_the_last(counted: Callable[[], int]) -> None:
    first = ForkServer(["counted_import", __name__])
    second = ForkServer(["counted_import"], address=first.address)
    pid = first.pid
    assert second.pid == pid
    one, two = fork(first), fork(second)
    assert counted() == 1
    first.close()
    assert not ended(pid)
    assert [actor.call("say").result(SECONDS) for actor in (one, two)] == [("a",), ("a",)]
    spares = children(pid) - {one.pid, two.pid}
    second.close()
    second.close()
    until(lambda: all(ended(process) for process in (pid, *spares)))


def test_what_one_order_lacks_is_imported_once_for_all(counted: Callable[[], int]) -> None:
    first = ForkServer([__name__])
    pid = first.pid
    second = ForkServer(["counted_import"], address=first.address)
    assert fork(second).call("imported", "counted_import").result(SECONDS)
    assert fork(second, "b").call("say").result(SECONDS) == ("b",)  # behind the new spare, which has the import
    os.kill(pid, signal.SIGKILL)
    assert fork(first).call("imported", "counted_import").result(SECONDS)
    assert counted() == 1
    first.close()
    second.close()


def test_an_actor_is_as_if_started_by_who_asks(tmp_path: Path) -> None:
    """It is not as if the starter of the server had started it."""
    server = ForkServer([__name__])
    script = (
        "import os, sys\nfrom tests.cluster.processes.forks.test_fork_server import ForkServer, fork\n"
        f"server = ForkServer([], address={server.address!r})\n"
        f"os.environ['CUDA_VISIBLE_DEVICES'] = '3'; os.chdir({str(tmp_path)!r})\n"
        "os.nice(2); open('/proc/self/oom_score_adj', 'w').write('7')\n"
        "actor = fork(server); actor.call('describe').result(60)\n"
    )
    asked = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    here = os.getpriority(os.PRIO_PROCESS, 0)
    assert asked.stdout == f"3 {tmp_path} {here + 2} 7 {server.address}\n"
    assert asked.stderr == "to stderr\n"
    server.close()


def test_nonsense_is_not_answered_and_stops_nothing() -> None:
    server = ForkServer([__name__])
    assert server.pid
    for nonsense in (b"", b"\xff" * 8, (2).to_bytes(8, "little") + b"[]", (1 << 20).to_bytes(8, "little") + b"{"):
        with socket.socket(socket.AF_UNIX) as asking:
            asking.connect(f"\0{server.address}")
            asking.sendall(nonsense)
            asking.shutdown(socket.SHUT_WR)
            assert asking.recv(1) == b""
    assert fork(server).call("say").result(SECONDS) == ("a",)
    server.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")
def test_other_users_are_refused() -> None:
    server = ForkServer([__name__])
    assert server.pid
    script = (
        "import os, socket, sys\nos.setuid(65534)\nasking = socket.socket(socket.AF_UNIX)\n"
        f"asking.connect('\\0{server.address}')\n"
        "try:\n    asking.sendall((2).to_bytes(8, 'little') + b'{}'); sys.exit(asking.recv(1) != b'')\n"
        "except ConnectionError:\n    pass"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=SECONDS).returncode == 0
    server.close()


def test_a_server_beside_a_process_has_its_imports_and_none_of_its_files(tmp_path: Path) -> None:
    held = tmp_path / "held"
    script = (
        "import signal, sys, wave\nfrom pathlib import Path\n"
        "from tests.cluster.processes.forks.test_fork_server import ForkServer, fork\n"
        f"held = open({str(held)!r}, 'w')\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('handled', flush=True))\n"
        "server = ForkServer.beside([], 'c')\n"
        "actor = fork(server)\n"
        "for asked in (('imported', 'wave'), ('parent',)):\n    print(actor.call(*asked).result(60), flush=True)\n"
        "sys.stdin.read()\nserver.close()\nprint('closed', flush=True)"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as parent:
        assert parent.stdout is not None
        assert parent.stdin is not None
        assert parent.stdout.readline() == "True\n"
        server = int(parent.stdout.readline())
        assert server in children(parent.pid)
        assert str(held) not in [os.readlink(file) for file in Path(f"/proc/{server}/fd").iterdir()]
        assert os.getsid(server) != os.getsid(parent.pid)
        os.kill(server, signal.SIGTERM)  # as of any process: it is no handler of its parent's that sees it
        until(lambda: ended(server))
        parent.stdin.close()
        assert parent.stdout.read() == "closed\n"


def test_a_server_that_hangs_in_its_imports_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "endless_import.py").write_text("import time\ntime.sleep(1000)\n")
    monkeypatch.syspath_prepend(tmp_path)
    name = f"hangs-{os.getpid()}"
    server = ForkServer(["endless_import"], name)
    with pytest.raises(StartFailed, match=r"within 0\.3 s"):
        server.fork("c/worker", pack((Actor, "a")), 0.3)
    until(lambda: bool(titled(name)))
    server.close()
    until(lambda: not titled(name))


def test_a_server_beside_a_process_lives_on_for_its_other_clients() -> None:
    script = (
        "from tests.cluster.processes.forks.test_fork_server import ForkServer, fork\n"
        "first = ForkServer.beside([], 'c'); second = ForkServer([], address=first.address)\n"
        "before = second.pid; assert first.pid == before; first.close()\n"
        "assert fork(second).call('parent').result(60) == before == second.pid; second.close()"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=SECONDS)


@pytest.mark.parametrize("stopped", [False, True])
def test_an_actor_ends_with_the_process_that_asked_for_it_and_others_do_not(stopped: bool) -> None:
    """It ends at once, even if it is stopped and its server gone: a GPU must be free for the next process."""
    server = ForkServer([__name__])
    other = fork(server)
    script = (
        "from tests.cluster.processes.forks.test_fork_server import ForkServer, fork\n"
        f"server = ForkServer([], address={server.address!r}); actor = fork(server); actor.call('say').result(60)\n"
        "print(actor.pid, flush=True); actor.call('wait').result()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        if stopped:
            os.kill(pid, signal.SIGSTOP)
            os.kill(server.pid, signal.SIGKILL)
        parent.kill()
    until(lambda: ended(pid))
    assert other.call("say").result(SECONDS) == ("a",)
    server.close()


def test_all_end_with_the_process_that_asked_for_them() -> None:
    script = (
        "from tests.cluster.processes.forks.test_fork_server import ForkServer, children, fork\n"
        "server = ForkServer([]); actor = fork(server); actor.call('say').result(60)\n"
        "print(server.pid, *children(server.pid), flush=True); actor.call('wait').result()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 3  # the server, its spare, the actor
        parent.kill()
    until(lambda: all(ended(pid) for pid in pids))
