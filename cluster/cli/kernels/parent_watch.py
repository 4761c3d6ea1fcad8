"""Ends a process that compiles, and its compilers, when the process that started it has ended."""

import os
import signal
import threading
import time

POLL_SECONDS = 0.5


def end_with(parent: int) -> None:
    """Kills this process and its group soon after `parent` has ended, even if it ended before this call. This process
    must lead its group, which then has only this process and those that it starts."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()
