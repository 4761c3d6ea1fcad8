"""Processes notice the end of the one that holds their lifeline."""

import os
import subprocess
import sys
import threading
from pathlib import Path

from tandem.cluster.processes.lifeline import Lifeline, wait_until_cut
from tandem.cluster.processes.process_tree import children, descendants, kill, runs, started_at

HOLDER = """
from tandem.cluster.processes.lifeline import Lifeline
lifeline = Lifeline()
print(lifeline.path, flush=True)
input()
"""
SECONDS = 30.0


def waiting(path: str) -> threading.Thread:
    thread = threading.Thread(target=wait_until_cut, args=(path,), daemon=True)
    thread.start()
    return thread


def test_a_cut_is_noticed_by_all_and_by_late_ones() -> None:
    lifeline = Lifeline()
    threads = [waiting(lifeline.path) for _ in range(2)]
    threads[0].join(0.1)
    assert all(thread.is_alive() for thread in threads)
    lifeline.cut()
    lifeline.cut()
    threads.append(waiting(lifeline.path))
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()


def test_a_killed_holder_is_noticed() -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLDER], text=True, **pipes) as holder:  # type: ignore[call-overload]
        assert holder.stdout is not None
        path = holder.stdout.readline().strip()
        thread = waiting(path)
        thread.join(0.1)
        assert thread.is_alive()
        holder.kill()
        thread.join(SECONDS)
        assert not thread.is_alive()


def test_another_file_at_that_path_is_no_lifeline(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (tmp_path / "file").open() as file:
        wait_until_cut(f"/proc/{os.getpid()}/fd/{file.fileno()}")
    wait_until_cut(f"/proc/{os.getpid()}/fd/999999")


def test_a_tree_of_processes_is_found_and_ended() -> None:
    nested = "import subprocess; subprocess.run(['sleep', '60'], check=False)"
    with subprocess.Popen([sys.executable, "-c", nested]) as parent:
        while not (below := descendants(parent.pid)):
            pass
        mine = (parent.pid, started_at(parent.pid))
        assert mine in children(os.getpid())
        assert below <= descendants(os.getpid())
        (child,) = below
        kill([(child[0], "1")])  # another process that has had that pid
        assert runs(child)
        kill([child])
        assert parent.wait(SECONDS) == 0
        assert not runs(child)
    assert not runs(mine)
