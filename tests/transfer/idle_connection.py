"""One end of a connection between PEs, in a process of its own: reports what happens to it while nothing is sent.

argv: silent_seconds, then the other end's host and port, or only the host to listen on. Prints the port that it listens
on, and "connected". For each line of standard input it sends a byte and awaits one, then it prints the result.
"""

import socket
import sys

from tandem.transfer.tcp.connections import _set_options

ANSWER_SECONDS = 20.0


def main(silent: str, host: str, port: str = "") -> None:
    if port:
        connection = socket.create_connection((host, int(port)))
    else:
        listener = socket.create_server((host, 0))
        print(listener.getsockname()[1], flush=True)
        connection, _ = listener.accept()
    _set_options(connection, float(silent))
    connection.settimeout(ANSWER_SECONDS)
    print("connected", flush=True)
    for _ in sys.stdin:
        try:
            connection.sendall(b"x")
            print("answered" if connection.recv(1) else "closed", flush=True)
        except OSError as error:
            print(error, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
