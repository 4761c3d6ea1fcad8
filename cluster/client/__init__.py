"""tandem's own client: what a program imports to talk to a gateway."""

from tandem.cluster.client.client import AsyncClient, Client
from tandem.cluster.protocol import Fork

__all__ = ["AsyncClient", "Client", "Fork"]
