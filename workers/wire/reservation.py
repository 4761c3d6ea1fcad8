"""The pages that a decode worker sets aside for one incoming sequence, as the sender sees them."""

from dataclasses import dataclass

from tandem.transfer.wire_map import WireMap


@dataclass(frozen=True)
class Reservation:
    """Pages for the KV of one prompt, and the signal by which the sender says that it is complete.

    The pages stay the receiver's. They are not reused while this sender may write.
    """

    reservation_id: int
    epoch: int  # of the receiver
    target_pe: int  # the receiver
    writer_pe: int  # the only PE that may write
    signal_slot: int
    generation: int  # which use of the slot this is
    matched_tokens: int  # positions that the receiver has already; the sender writes those after
    wire_map: WireMap | None  # None: the receiver computes the prompt itself, and nobody may write
    pages: int  # held for the request, with its growth and the pages of a shared prefix
    # The receiver asks its pages back when no StartGenerate comes within it. The writer stops when no RemoteSend has
    # waited for so long.
    lease_seconds: float
    writer_epoch: int = 0  # of the writer; 0: as epoch
    authentic: bool = True  # whether it is as its receiver made it
