"""tandem's own client: what a program imports to talk to a gateway."""

from tandem.cluster.client.client import AsyncClient, Client

__all__ = ["AsyncClient", "Client"]
