"""Tells a prefill worker whether a decode worker of its island offered a reservation, and it is unchanged.

HMAC-SHA256 (RFC 2104) by the island's token. A damaged or forged message would make its reader write
into pages of other requests, and nothing in the map itself tells whose they are.
"""

import hmac

from tandem.proto import worker_pb2


def seal(reservation: worker_pb2.Reservation, token: str) -> None:
    """Seals the message as it stands."""
    reservation.seal = _digest(reservation, token)


def is_sealed(reservation: worker_pb2.Reservation, token: str) -> bool:
    return hmac.compare_digest(reservation.seal, _digest(reservation, token))


def _digest(reservation: worker_pb2.Reservation, token: str) -> bytes:
    bare = worker_pb2.Reservation()
    bare.CopyFrom(reservation)
    bare.ClearField("seal")
    return hmac.digest(token.encode(), bare.SerializeToString(deterministic=True), "sha256")
