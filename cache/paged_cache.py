"""One worker's paged KV cache: sequences, the plan of each forward, attention, and both ends of a transfer."""

from tandem.cache.operations.forwards import ForwardCalls
from tandem.cache.operations.sequences import SequenceCalls
from tandem.cache.operations.transfers import TransferCalls


class PagedKVCache(SequenceCalls, ForwardCalls, TransferCalls):
    """Semantics as in Apache TVM's PagedAttentionKVCache. Owned by one thread, which makes every call.

    Each forward: begin → the model's layers through the forward's attention, or a replay of the graph captured for its
    buffers → commit. Sequences share pages with each other and with the prefix index; none notices what another does
    with its own. The calls stand in three faces: SequenceCalls, ForwardCalls and TransferCalls. Parts makes a cache.

    A layer group keeps of each sequence the pages that later queries need, by its span. What is behind is let go of
    when the next forward is begun, so that forward comes, on the device, after the one before; it is out of reach for
    pop, fork_sequence and gather_group. With windows a prefix is found where what the next query sees is there.

    Calls raise InvalidArgument for an unknown sequence or a value that is not accepted, OutOfPages when the pool and
    what can be evicted from the prefix index do not suffice; either leaves everything as it was.
    """
