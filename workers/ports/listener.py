"""The listening socket of a port that strangers reach."""

import socket

ACCEPTED = 2  # connections in one turn of the event loop; over TLS each costs it 3 ms
QUEUED = 2048  # connections that wait for that in the kernel
SILENT_SECONDS = 60  # without a sign of life, or with data that the client does not read
OPTIONS = (  # which connections inherit from their listener
    ((socket.IPPROTO_TCP, socket.TCP_NODELAY), 1),  # asyncio sets it for sockets that it made; else events wait 40 ms
    ((socket.SOL_SOCKET, socket.SO_KEEPALIVE), 1),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPIDLE), SILENT_SECONDS // 2),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPINTVL), SILENT_SECONDS // 6),
    ((socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT), 1000 * SILENT_SECONDS),
)


def listener(host: str, port: int, *, shared: bool) -> socket.socket:
    """Port 0 takes any free one. shared: with others of this user. Raises OSError.

    asyncio accepts as many connections in one turn as its `backlog` says, and asks the kernel to queue no more. So its
    servers get ACCEPTED, and listen(QUEUED) follows.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.create_server((host, port), family=family, dualstack_ipv6=host == "::", reuse_port=shared)
    for option, value in OPTIONS:
        made.setsockopt(*option, value)
    return made
