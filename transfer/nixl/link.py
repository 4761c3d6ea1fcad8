"""An agent of NIXL for one peer: its registrations, its work under way, and its end.

Each peer has an agent of its own. UCX writes wherever the other side says, and NIXL cannot take one peer's right to do
so away from an agent that others use. The end of an agent takes its connections, its worker of UCX and its registered
memory with it. So no write of that peer lands here any more (decision 0148).
"""

import base64
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from tandem.transfer.errors import TransportError
from tandem.transfer.membership import Detail
from tandem.transfer.nixl.memory import NixlMemory
from tandem.transfer.nixl.peer import Item, Peer

FIELDS = ("name", "metadata", "memory", "device", "pools", "inbox", "slot_bytes")
log = logging.getLogger(__name__)


class Remote:
    """The addresses of a peer's memory, by its handle. TransportError where the handle has none."""

    def __init__(self, pe: int, own_pe: int, detail: Detail, num_pools: int) -> None:
        try:
            self.name = agent_name(str(detail["name"]), own_pe)
            self.metadata = base64.b64decode(str(detail["metadata"]).split(",")[own_pe], validate=True)
            self.memory, self.device = str(detail["memory"]), int(detail["device"])
            self.pools = [int(address) for address in str(detail["pools"]).split(",")]
            self.inbox, self.slot_bytes = int(detail["inbox"]), int(detail["slot_bytes"])
            if len(self.pools) != num_pools or self.memory not in ("DRAM", "VRAM") or not self.metadata:
                raise ValueError(f"{len(self.pools)} pools in {self.memory}")
        except (KeyError, ValueError, IndexError) as error:
            raise TransportError(f"PE {pe}'s handle has detail {detail}; it must have {', '.join(FIELDS)}") from error


class Link:
    """Made by any thread; once the exchange has it, only its thread touches the agent."""

    def __init__(self, peer: Peer, name: str, memory: NixlMemory, make_agent: Callable[[str], Any]) -> None:
        """name: of this PE's agents. make_agent: makes the one of a name. TransportError."""
        self.peer = peer
        self.begun: deque[tuple[Item, Any]] = deque()
        self.moved = 0.0  # when the oldest write came to be the oldest
        self.sent = self.said = 0  # numbers of notes
        self.beat = 0.0
        self.heard = 0.0  # 0 until the first note: the peer may not have joined
        self.ended = threading.Event()  # nothing that the peer wrote lands any more
        self.remote: Remote | None = None
        try:
            if memory.device is not None:
                torch.cuda.set_device(memory.device)
            self.agent: Any = make_agent(agent_name(name, peer.pe))
            rings = [memory.inbox[peer.pe], memory.outbox[peer.pe]]
            self._registered = [self.agent.register_memory(one) for one in (list(memory.tensors), rings)]
            self.metadata = base64.b64encode(self.agent.get_agent_metadata()).decode()
        except Exception as error:  # NIXL's have no common class
            raise TransportError(f"NIXL cannot use the memory or the network of this PE: {error}") from error

    def connect(self, remote: Remote) -> None:
        """Reaches the peer's agent. TransportError."""
        try:
            found = self.agent.add_remote_agent(remote.metadata).decode()
            if found != remote.name:
                raise TransportError(f"PE {self.peer.pe}'s metadata is of {found!r}; {remote.name!r} is expected")
            self.agent.make_connection(remote.name)
        except TransportError:
            raise
        except Exception as error:
            raise TransportError(f"NIXL cannot reach PE {self.peer.pe}: {error}") from error
        self.remote = remote

    def end(self) -> None:
        """Cancels what is under way, and ends the agent. Idempotent."""
        agent, self.agent = self.agent, None
        if agent is None:
            return
        for _, handle in self.begun:
            if handle is not None:
                self._try(handle.release)
        self.begun.clear()
        if self.remote is not None:
            self._try(agent.remove_remote_agent, self.remote.name)
        for registered in self._registered:
            self._try(agent.deregister_memory, registered)
        self._registered.clear()
        del agent
        self.ended.set()

    def _try(self, call: Callable[..., object], *arguments: object) -> None:
        try:
            call(*arguments)
        except Exception:
            log.warning("PE %d: the end of its agent goes on without a call", self.peer.pe, exc_info=True)


def agent_name(name: str, pe: int) -> str:
    """Names the agent that a PE has for another."""
    return f"{name}-{pe}"
