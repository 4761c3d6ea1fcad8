"""One worker's paged KV cache: sequences, the plan of each forward, attention, and both ends of a transfer."""

from tandem.cache.operations.forwards import ForwardCalls
from tandem.cache.operations.parking import ParkingCalls
from tandem.cache.operations.sequences import SequenceCalls
from tandem.cache.operations.stored import StoredCalls
from tandem.cache.operations.transfers import TransferCalls


class PagedKVCache(SequenceCalls, ForwardCalls, TransferCalls, ParkingCalls, StoredCalls):
    """Semantics as in Apache TVM's PagedAttentionKVCache. Owned by one thread, which makes every call.

    A forward is begin(), then the model's layers or a replay of a captured graph, then commit(). Sequences share pages
    with each other and with the prefix index, and never see each other's changes. Base classes hold the calls:
    SequenceCalls, ForwardCalls, TransferCalls, ParkingCalls and StoredCalls. Parts makes a cache.

    By its span, a layer group keeps the pages of a sequence that later queries need. begin() of the next forward frees
    the others, so on the device that forward must run after the one before. pop, fork_sequence and gather_group cannot
    reach freed positions. With windows, a prefix is a hit if the positions that the next query sees are stored.

    Calls raise InvalidArgument for an unknown sequence or a bad value. They raise OutOfPages if the free pages and the
    evictable pages of the prefix index are not enough. Both errors change nothing.
    """
