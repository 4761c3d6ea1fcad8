"""One worker's paged KV cache: sequences, the plan of each forward, attention, and both ends of a transfer."""

from collections.abc import Sequence

from torch import Tensor

from tandem.cache.attention.layer_groups import Heads
from tandem.cache.kernels.base import KernelFactory
from tandem.cache.kernels.choice import choose_kernels
from tandem.cache.operations.forwards import ForwardCalls
from tandem.cache.operations.sequences import SequenceCalls
from tandem.cache.operations.transfers import TransferCalls
from tandem.cache.plan.latent import LatentHeads
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.page_writer import PageWriter
from tandem.cache.plan.rope import RopeParameters


class PagedKVCache(SequenceCalls, ForwardCalls, TransferCalls):
    """Semantics as in Apache TVM's PagedAttentionKVCache. Owned by one thread, which makes every call.

    Each forward: begin → the model's layers through the forward's attention, or a replay of the graph captured for its
    buffers → commit. Sequences share pages with each other and with the prefix index; none notices what another does
    with its own. The calls stand in three faces: SequenceCalls, ForwardCalls and TransferCalls.

    A layer group with a window keeps of each sequence the pages that later queries can see. What is behind is let go of
    when the next forward is begun, so that forward comes, on the device, after the one before; it is out of reach for
    pop, fork_sequence and gather_kv. Layouts with windows share no prefixes.

    Calls raise InvalidArgument for an unknown sequence or a value that is not accepted, OutOfPages when the pool and
    what can be evicted from the prefix index do not suffice; either leaves everything as it was.
    """

    def __init__(
        self,
        layout: KVLayout,
        pools: Sequence[Tensor],
        *,
        max_sequences: int,
        max_sequence_length: int,
        rope: RopeParameters | Sequence[RopeParameters],
        writer: PageWriter | None,
        scale: float | None = None,
        softcap: float | None = None,
        latent: LatentHeads | None = None,
        kernels: KernelFactory = choose_kernels,
    ) -> None:
        """pools: per layer group `[num_pages, *layout.page_shape(group)]`, contiguous, the caller's; what they hold at
        first does not matter. rope: one for all groups, or one for each. writer: None when nothing is sent.

        scale: of the softmax; None is that of q's width, ** -0.5. softcap: scores become softcap · tanh(score /
        softcap), not with latents. latent: the heads that read those of groups with latents.
        """
        super().__init__(
            layout,
            pools,
            Heads(scale, softcap, latent),
            kernels,
            max_sequences=max_sequences,
            max_sequence_length=max_sequence_length,
            rope=rope,
            writer=writer,
        )
