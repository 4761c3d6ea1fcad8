"""Looks at every frame of this host's network until standard input ends. argv: a file of byte strings, in hex.

Prints how often each of them came, also over the border of two frames of a connection; how many frames carry data of
each HOST:PORT, and how many it missed.
"""

import json
import select
import socket
import struct
import sys
from collections import Counter
from pathlib import Path

ALL_PROTOCOLS, IPV4, TCP = 3, 0x0800, 6
SOL_PACKET, PACKET_STATISTICS, RCVBUFFORCE = 263, 6, 33  # as Linux numbers them
BUFFER_BYTES = 1 << 26
ETHERNET_BYTES = 14


def data_of(frame: bytes) -> tuple[list[str], bytes]:
    """Returns sender and receiver, HOST:PORT, and the data of a TCP frame; nothing for other frames."""
    ip = frame[ETHERNET_BYTES:]
    if len(ip) < 20 or frame[12:14] != IPV4.to_bytes(2, "big") or ip[9] != TCP:
        return [], b""
    header = 4 * (ip[0] & 15)
    tcp = ip[header : int.from_bytes(ip[2:4], "big") or None]
    ports = struct.unpack_from("!HH", tcp)
    ends = [f"{socket.inet_ntoa(ip[12 + 4 * end : 16 + 4 * end])}:{ports[end]}" for end in (0, 1)]
    return ends, tcp[4 * (tcp[12] >> 4) :]


def main(path: str) -> None:
    needles = [bytes.fromhex(line) for line in Path(path).read_text().split()]
    found, frames = [0] * len(needles), Counter[str]()
    overlap = max(map(len, needles)) - 1
    ends_of_flows: dict[tuple[str, ...], bytes] = {}
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS)) as network:
        network.setsockopt(socket.SOL_SOCKET, RCVBUFFORCE, BUFFER_BYTES)
        network.bind(("eth0", ALL_PROTOCOLS))
        network.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8)  # reading them clears them
        print("ready", flush=True)
        while True:
            readable, _, _ = select.select([network, sys.stdin], [], [])
            if network not in readable:
                break  # all that had come was read before the end
            ends, data = data_of(network.recv(1 << 17))
            if data:
                frames.update(ends)
                data = ends_of_flows.get(tuple(ends), b"") + data
                ends_of_flows[tuple(ends)] = data[-overlap:]
                found = [count + (needle in data) for count, needle in zip(found, needles, strict=True)]
        _, missed = struct.unpack("II", network.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8))
    print(json.dumps({"found": found, "frames": frames, "missed": missed}))


if __name__ == "__main__":
    main(*sys.argv[1:])
