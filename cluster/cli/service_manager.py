"""What `tandem up` tells the service manager that has started it, by systemd's notify protocol (sd_notify)."""

import logging
import os
import socket
import threading
from collections.abc import Callable, MutableMapping

SOCKET = "NOTIFY_SOCKET"
WATCHDOG_MICROSECONDS = "WATCHDOG_USEC"
WATCHDOG_PID = "WATCHDOG_PID"
BEATS = 3  # in the time after which systemd ends a silent service
SEND_SECONDS = 1.0
log = logging.getLogger(__name__)


class ServiceManager:
    """Sends datagrams to its socket. Without one, nothing is sent. The first failure is logged; none is raised."""

    def __init__(self, address: str, watchdog_seconds: float = 0.0) -> None:
        """address: a path, or a name that begins with @ in Linux' abstract namespace; empty: there is no manager.
        watchdog_seconds: the silence after which it ends this process; 0: it does not."""
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._watchdog_seconds = watchdog_seconds
        self._socket: socket.socket | None = None
        self._closed = threading.Event()
        self._beats: threading.Thread | None = None
        self._failed = self._stops = False
        if address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.settimeout(SEND_SECONDS)

    @classmethod
    def from_environ(cls, environ: MutableMapping[str, str]) -> "ServiceManager":
        """Reads the variables and removes them, so that no later process speaks for this one."""
        address = environ.pop(SOCKET, "")
        microseconds, pid = environ.pop(WATCHDOG_MICROSECONDS, ""), environ.pop(WATCHDOG_PID, "")
        watched = microseconds.isdecimal() and pid in ("", str(os.getpid()))
        return cls(address, int(microseconds) / 1e6 if watched else 0.0)

    def status(self, text: str) -> None:
        """Sets what `systemctl status` shows. text: one line."""
        self._send(f"STATUS={text}")

    def ready(self, text: str, alive: Callable[[], bool]) -> None:
        """Tells that the service is up. Until close(), a thread then shows that it is alive, while alive() is true or
        it stops. text: as of status()."""
        self._send(f"READY=1\nSTATUS={text}")
        if self._socket is not None and self._watchdog_seconds > 0:
            self._beats = threading.Thread(target=self._beat, args=(alive,), name="watchdog", daemon=True)
            self._beats.start()

    def stopping(self) -> None:
        """Tells that the service stops. That may take long, and has its own time limit."""
        self._stops = True
        self._send("STOPPING=1\nSTATUS=stopping")

    def close(self) -> None:
        """Idempotent."""
        self._closed.set()
        if self._beats is not None:
            self._beats.join()
            self._beats = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _beat(self, alive: Callable[[], bool]) -> None:
        while not self._closed.wait(self._watchdog_seconds / BEATS):
            if self._stops or alive():
                self._send("WATCHDOG=1")

    def _send(self, message: str) -> None:
        to = self._socket
        if to is None:
            return
        try:
            to.sendto(message.encode(), self._address)
        except OSError as error:
            if not self._failed:
                log.warning("the service manager at %s does not hear this process: %s", SOCKET, error.strerror or error)
            self._failed = True
