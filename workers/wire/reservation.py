"""What a decode worker sets aside for one incoming sequence, as the sender sees it."""

from dataclasses import dataclass

from tandem.transfer.wire_map import WireMap


@dataclass(frozen=True)
class Reservation:
    """Where the KV of positions matched_tokens … of one prompt goes, and how to say that it has landed.

    The sender owns nothing here: the pages stay the receiver's, and are not reused while this sender may write.
    Only writer_pe may write, and signals under (signal_slot, generation). pages counts those held for the request, its
    growth and what it shares included. lease_seconds: the pages are asked back when no StartGenerate comes within it,
    and the writer stops when no RemoteSend has waited for so long. authentic: whether it is as its receiver made it.
    """

    reservation_id: int
    epoch: int
    target_pe: int
    writer_pe: int
    signal_slot: int
    generation: int
    matched_tokens: int
    wire_map: WireMap
    pages: int
    lease_seconds: float
    authentic: bool = True
