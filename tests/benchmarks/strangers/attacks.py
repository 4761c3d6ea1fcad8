"""The parts of an attack on a cluster."""

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tandem.cluster.credentials import ClientSecurity


@dataclass(frozen=True)
class Target:
    """A running cluster as a stranger sees it. http, grpc and metrics are HOST:PORT of the gateway's ports."""

    http: str
    grpc: str
    metrics: str
    token: str  # of clients: what an attacker would send that has one
    tls_ca: str | None = None  # certificate of the authority, where the ports speak TLS

    @property
    def security(self) -> ClientSecurity:
        """The security of a client that has the token."""
        return ClientSecurity(token=self.token, tls_ca=self.tls_ca)


Answers = Counter[str]
"""The answers that attackers got, and how often. Each attack chooses what it counts."""

Attack = Callable[[Target, Answers], Awaitable[None]]
"""The life of one attacking connection. It is called again when it ends or fails, until the phase is over. Then it is
cancelled."""


def by_name(*attacks: Attack) -> dict[str, Attack]:
    """The attacks by the names of their functions."""
    return {attack.__name__: attack for attack in attacks}
