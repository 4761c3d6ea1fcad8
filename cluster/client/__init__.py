"""tandem's own client, by which a program talks to a gateway."""

from tandem.cluster.client.client import AsyncClient, Client
from tandem.cluster.protocol import Fork

__all__ = ["AsyncClient", "Client", "Fork"]
