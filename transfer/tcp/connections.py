"""Opens connections to a PE, and accepts connections from others."""

import hmac
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable

from tandem.transfer.endpoint import PAGES_NAME, Endpoint
from tandem.transfer.errors import MembershipRefused, PeerGone, TransportError, TransportTimeout
from tandem.transfer.membership import TransportConfig
from tandem.transfer.tcp.frames import DATA_CONNECTIONS
from tandem.transfer.tcp.hello import PROTOCOL, Hello, answer, read_answer, read_hello
from tandem.transfer.tcp.peer import cut
from tandem.transfer.tcp.tls import context, is_of_a_pe

HANDSHAKE_SECONDS = 30.0
MAX_STRANGERS = 64  # connections that have not said yet who they are; others wait in the kernel
END_SECONDS = 10.0
MOST_KEEPALIVE_SECONDS = 5
log = logging.getLogger(__name__)

Receive = Callable[[int, int, socket.socket], None]
"""Takes a PE, the number of its connection, and the connection, and returns when that has ended."""


def connect(endpoint: Endpoint, address: tuple[str, int], hello: Hello) -> socket.socket:
    """A connection that the PE there has accepted. PeerGone where it does not listen any more; MembershipRefused."""
    deadline = time.monotonic() + HANDSHAKE_SECONDS
    try:
        connection = socket.create_connection(address, HANDSHAKE_SECONDS)
        try:
            _set_options(connection, endpoint.silent_seconds)
            tls = context(endpoint, server=False)
            if tls is not None:
                connection = tls.wrap_socket(connection, server_hostname=PAGES_NAME)
            connection.sendall(hello.pack())
            reason = read_answer(connection, deadline)
            if reason:
                raise MembershipRefused(f"PE {hello.to_pe} refuses the connection of PE {hello.pe}: {reason}")
            connection.settimeout(None)
        except BaseException:
            connection.close()
            raise
    except ssl.SSLError as error:
        raise MembershipRefused(
            f"PE {hello.to_pe} at {address[0]}:{address[1]} is not of this cluster: {error}"
        ) from error
    except OSError as error:
        raise PeerGone(f"PE {hello.to_pe} at {address[0]}:{address[1]} cannot be reached: {error}") from error
    return connection


class Listener:
    """Accepts each connection of the expected PEs once, and closes when all are there."""

    def __init__(self, config: TransportConfig, token: bytes, receive: Receive, expected: Iterable[int]) -> None:
        """token: what connections must show. TransportError when the address cannot be listened on."""
        self._config = config
        self._token = token.hex()
        self._receive = receive
        self._tls = context(config.endpoint, server=True)
        host = config.endpoint.host
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, 0), family=family, backlog=MAX_STRANGERS)
        except OSError as error:
            raise TransportError(f"PE {config.pe} cannot listen on {host}: {error}") from error
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._room = threading.Semaphore(MAX_STRANGERS)
        self._lock = threading.Lock()
        self._strangers: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()
        self._expected = set(expected)
        self._accepted: set[tuple[int, int]] = set()  # PE and number of each connection
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="tcp-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops accepting connections, and waits until the threads of accepted ones have ended. Their peers close
        first.

        TransportTimeout when one does not end: it may still write into the pages.
        """
        with self._lock:
            self._closed = True
            for stranger in self._strangers:
                cut(stranger)
        cut(self._socket)
        self._thread.join(END_SECONDS)
        deadline = time.monotonic() + END_SECONDS
        for thread in list(self._threads):
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                raise TransportTimeout(f"a connection of PE {self._config.pe} did not end within {END_SECONDS:g} s")

    def forget(self, pe: int) -> None:
        """Stops accepting connections of that PE."""
        with self._lock:
            self._expected.discard(pe)
            self._accepted = {one for one in self._accepted if one[0] != pe}
        if self._is_over:
            cut(self._socket)

    def _accept(self) -> None:
        with self._socket:
            while True:
                self._room.acquire()
                try:
                    connection, _ = self._socket.accept()
                except OSError as error:
                    if self._is_over:
                        return
                    log.warning("PE %d could not accept a connection: %s", self._config.pe, error)
                    self._room.release()
                    time.sleep(0.1)  # too many open files, perhaps: they pass
                    continue
                with self._lock:
                    if self._closed:
                        connection.close()
                        return
                    thread = threading.Thread(target=self._serve, args=(connection,), name="tcp-receive", daemon=True)
                    self._strangers.add(connection)
                    self._threads.add(thread)
                thread.start()

    @property
    def _is_over(self) -> bool:
        with self._lock:
            return self._closed or len(self._accepted) == len(self._expected) * (DATA_CONNECTIONS + 1)

    def _serve(self, connection: socket.socket) -> None:
        """Serves one connection, from its first byte to its end."""
        try:
            hello, known = self._greet(connection)
            with known:
                self._receive(hello.pe, hello.connection, known)
        except (OSError, TransportError) as error:
            log.warning("PE %d refused a connection: %s", self._config.pe, error)
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _greet(self, connection: socket.socket) -> tuple[Hello, socket.socket]:
        """Returns the peer's hello, and the connection to be read, which is open. MembershipRefused or OSError: it is
        closed."""
        deadline = time.monotonic() + HANDSHAKE_SECONDS
        known = connection
        try:
            _set_options(connection, self._config.endpoint.silent_seconds)
            connection.settimeout(HANDSHAKE_SECONDS)
            if self._tls is not None:
                known = self._wrap(self._tls, connection)
            hello = read_hello(known, deadline)
            refusal = self._refusal(hello)
            known.settimeout(HANDSHAKE_SECONDS)
            answer(known, refusal)
            if refusal:
                raise MembershipRefused(refusal)
            known.settimeout(None)
        except BaseException:
            known.close()
            raise
        finally:
            with self._lock:
                self._strangers -= {connection, known}
            self._room.release()
        if self._is_over:
            cut(self._socket)
        return hello, known

    def _wrap(self, tls: ssl.SSLContext, connection: socket.socket) -> socket.socket:
        """Wraps a connection in TLS. Another object then has the connection's descriptor."""
        known = tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        try:
            with self._lock:
                self._strangers.discard(connection)
                if self._closed:
                    raise ConnectionAbortedError("the epoch has ended")
                self._strangers.add(known)
            known.do_handshake()
            if not is_of_a_pe(known):
                raise MembershipRefused("its certificate is not a PE's")
        except BaseException:
            with self._lock:
                self._strangers.discard(known)
            known.close()
            raise
        return known

    def _refusal(self, hello: Hello) -> str:
        """Why a connection is refused; empty once it is counted as accepted."""
        config = self._config
        expected = {"protocol": PROTOCOL, "island": config.island, "epoch": config.epoch, "to_pe": config.pe}
        for field, value in expected.items():
            if getattr(hello, field) != value:
                return f"{field} is {getattr(hello, field)!r}; {value!r} is expected here"
        if not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            return "token is another one than that of this PE's handle"
        if not 0 <= hello.pe < config.num_pes or hello.pe == config.pe:
            return f"pe is {hello.pe}; another one of 0 … {config.num_pes - 1} is expected here"
        if not 0 <= hello.connection <= DATA_CONNECTIONS:
            return f"connection is {hello.connection}; it must be from 0 to {DATA_CONNECTIONS}"
        with self._lock:
            if hello.pe not in self._expected:
                return f"pe is {hello.pe}; one of {sorted(self._expected)} is expected here"
            if self._closed or (hello.pe, hello.connection) in self._accepted:
                return f"connection {hello.connection} of PE {hello.pe} was there already"
            self._accepted.add((hello.pe, hello.connection))
        return ""


def keepalive_seconds(silent_seconds: float) -> int:
    """Returns the seconds between probes of an idle connection. Linux ends it when a probe was not answered and the
    next is due TCP_USER_TIMEOUT after the last sign of life, however short the link was down. With more frequent probes
    an answer arrives first, if the link was down for less than half of silent_seconds."""
    return max(1, min(MOST_KEEPALIVE_SECONDS, int(silent_seconds / 4)))


def _set_options(connection: socket.socket, silent_seconds: float) -> None:
    """Small frames go at once, and a host that is gone is noticed; a link that is down for a while is not."""
    pause = keepalive_seconds(silent_seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silent_seconds * 1000))
