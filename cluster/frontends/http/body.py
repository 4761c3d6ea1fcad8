"""The body of one call: JSON, of a bounded size, within a bounded time."""

import asyncio

from tandem.cluster.frontends.http.caller import ClientGone, header
from tandem.cluster.frontends.http.errors import HttpError
from tandem.cluster.frontends.http.reply import BODY_BYTES, Receive, Scope
from tandem.cluster.requests.body_budget import Body

BODY_SECONDS = 60.0  # for a client's body


async def read_body_of(scope: Scope, receive: Receive, held: Body, max_bytes: int) -> bytearray:
    """Reads the bytes, which `held` counts as they come. Raises HttpError for another media type, too many bytes, or a
    client that is too slow; and ClientGone."""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await _read(scope, receive, held, max_bytes)
    except TimeoutError:
        reason = f"the body did not come within {BODY_SECONDS:g} s"
        raise HttpError(408, reason, headers={"connection": "close"}) from None


async def _read(scope: Scope, receive: Receive, held: Body, max_bytes: int) -> bytearray:
    media_type = ";".join(header(scope, "content-type"))
    if media_type.partition(";")[0].strip().lower() != "application/json":
        raise HttpError(415, f"content-type is {media_type!r:.80}; it must be application/json")
    coding = next((one for one in header(scope, "content-encoding") if one.strip().lower() != "identity"), None)
    if coding is not None:
        raise HttpError(415, f"content-encoding is {coding!r:.80}; leave it out, or send identity")
    declared = int((header(scope, "content-length") or ["0"])[0])
    _check_size(declared, max_bytes)
    held.hold(declared)
    data, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        data += message["body"]
        received = max(len(data), scope.get("state", {}).get(BODY_BYTES, 0))
        _check_size(received, max_bytes)
        held.hold(max(declared, received))
        more = message["more_body"]
    return data


def _check_size(size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise HttpError(
            413, f"the body has {size} bytes or more; it may have at most {max_bytes} (gateway.max_message_mib)"
        )
