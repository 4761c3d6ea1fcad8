"""Free ports for servers that start later, which nobody gets by chance until then.

They are below those that the system hands out, and above those that Ray takes for its workers.
"""

import random
import socket
from contextlib import suppress

PORTS = range(20_000, 32_768)


def free_ports(count: int) -> list[int]:
    found = list[int]()
    while len(found) < count:
        port = random.SystemRandom().choice(PORTS)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found += [port] if port not in found else []
    return found
