"""One call's client: its headers, its host, and whether it is still there."""

import asyncio
from typing import TypeVar

from tandem.cluster.frontends.http.reply import Receive, Scope
from tandem.cluster.protocol import CLIENT_ID_KEY
from tandem.cluster.requests.origin import current_origin
from tandem.workers.event_loop import unwatched
from tandem.workers.ports.authentication import HEADER

T = TypeVar("T")


class ClientGone(Exception):
    """The client has closed its connection."""


def header(scope: Scope, name: str) -> list[str]:
    """Returns the values of a request's header. Its name is in lower case."""
    wanted = name.encode("latin-1")
    return [value.decode("latin-1") for key, value in scope["headers"] if key == wanted]


def credentials_of(scope: Scope) -> list[str]:
    """Returns the credentials that the caller shows, in Authorization or in the header of Anthropic's clients."""
    return header(scope, HEADER) or [f"Bearer {key}" for key in header(scope, "x-api-key")]


def client_of(scope: Scope) -> str:
    """Returns the client that a request belongs to: its key, else its header client-id, else its host."""
    access = current_origin.get().access
    if access.name:
        return f"key:{access.name}"
    given = header(scope, CLIENT_ID_KEY)
    return f"id:{given[0]}" if given and given[0] else f"http:{host_of(scope)}"


def host_of(scope: Scope) -> str:
    return (scope["client"] or ("",))[0]


async def unless_gone(receive: Receive, work: "asyncio.Task[T]") -> T:
    """Returns what the work returns. If the client goes, cancels the work and raises ClientGone."""
    unwatched(work)
    gone = unwatched(asyncio.ensure_future(_disconnected(receive)))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientGone
        return work.result()
    finally:
        work.cancel()
        gone.cancel()
        await asyncio.wait((work, gone))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
