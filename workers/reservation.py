"""What a decode worker sets aside for one incoming sequence, as the sender sees it."""

from dataclasses import dataclass

from tandem.transfer.wire_map import WireMap


@dataclass(frozen=True)
class Reservation:
    """Where the KV of positions matched_tokens … of one prompt goes, and how to say that it has landed.

    The sender owns nothing here: the pages stay the receiver's, and are not reused while this sender may write.
    pages counts those held for the request, its growth and what it shares included.
    """

    reservation_id: int
    epoch: int
    target_pe: int
    signal_slot: int
    generation: int
    matched_tokens: int
    wire_map: WireMap
    pages: int
