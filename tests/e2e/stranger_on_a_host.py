"""A stranger on a host. argv: the certificate that it shows and its key in one file, and addresses to call.

Prints for each whether a server of HTTP/2 answers it: without TLS, and over TLS with the certificate, whoever answers;
then the status by which one of HTTP/1.1 answers its question for /metrics, in both ways, null where none does.
"""

import json
import socket
import ssl
import sys

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
QUESTION = b"GET /metrics HTTP/1.1\r\nhost: stranger\r\nconnection: close\r\n\r\n"
SECONDS = 20
SETTINGS = 4  # the type of a server's first frame


def answer(address: str, context: ssl.SSLContext | None, sent: bytes) -> bytes:
    """Returns the first bytes that come back; none if nothing does."""
    host, port = address.rsplit(":", 1)
    try:
        with socket.create_connection((host, int(port)), SECONDS) as plain:
            connection = plain if context is None else context.wrap_socket(plain)
            connection.sendall(sent)
            return connection.recv(12)
    except TimeoutError:
        raise
    except OSError:  # an alert of TLS, or a connection that is refused or closed
        return b""


def is_answered(address: str, context: ssl.SSLContext | None) -> bool:
    return answer(address, context, PREFACE)[3:4] == bytes([SETTINGS])


def status(address: str, context: ssl.SSLContext | None) -> int | None:
    version, _, number = answer(address, context, QUESTION).partition(b" ")
    return int(number) if version == b"HTTP/1.1" else None


def main(pair: str, *addresses: str) -> None:
    contexts = [ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) for _ in range(2)]
    for context in contexts:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.load_cert_chain(pair)
    http, http2 = contexts
    http2.set_alpn_protocols(["h2"])
    heard = [
        [is_answered(one, None), is_answered(one, http2), status(one, None), status(one, http)] for one in addresses
    ]
    print(json.dumps(heard))


if __name__ == "__main__":
    main(*sys.argv[1:])
