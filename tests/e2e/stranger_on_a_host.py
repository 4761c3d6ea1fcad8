"""A stranger on a host. argv: the certificate that it shows and its key in one file, and addresses to call.

Prints for each whether a server of HTTP/2 answers it: without TLS, and over TLS with the certificate, whoever answers.
"""

import json
import socket
import ssl
import sys

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
SECONDS = 20
SETTINGS = 4  # the type of a server's first frame


def is_answered(address: str, context: ssl.SSLContext | None) -> bool:
    host, port = address.rsplit(":", 1)
    try:
        with socket.create_connection((host, int(port)), SECONDS) as plain:
            connection = plain if context is None else context.wrap_socket(plain)
            connection.sendall(PREFACE)
            return connection.recv(9)[3:4] == bytes([SETTINGS])
    except TimeoutError:
        raise
    except OSError:  # an alert of TLS, or a connection that is refused or closed
        return False


def main(pair: str, *addresses: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.load_cert_chain(pair)
    context.set_alpn_protocols(["h2"])
    print(json.dumps([[is_answered(address, None), is_answered(address, context)] for address in addresses]))


if __name__ == "__main__":
    main(*sys.argv[1:])
