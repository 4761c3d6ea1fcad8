"""K and V of an encoder, which a sequence is given before its first token."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.cache.kinds.kv import KV
from tandem.cache.kinds.latent import Latent
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.spans import Given, Span


@dataclass(frozen=True)
class GivenKV(KV):
    """K and V of an encoder. K is not rotated: Attention.store_given stores it, and read() attends to it. See Given."""

    keeps: Span = field(default=Given(), init=False)

    readable = False
    no_sliding = "an encoder's entries"

    def check(self, index: int, groups: Sequence[LayerGroup], page_size: int) -> None:
        """Checks that groups that keep their own K and V come first."""
        super().check(index, groups, page_size)
        layers = sorted({layer for group in groups if group.keeps.given for layer in group.layers})
        beside = [at for at, group in enumerate(groups) if not group.kind.attended]
        if beside:  # a border is counted in pages of page_size positions, and these groups may have others
            raise InvalidArgument(
                f"layers {layers} keep an encoder's entries, but groups {beside} stand beside others; a layout has one "
                "of both"
            )
        if groups[0].keeps.given or any(isinstance(group.kind, Latent) for group in groups):
            raise InvalidArgument(
                f"layers {layers} keep an encoder's entries; the first group must keep its own, and all groups must "
                "keep K and V"
            )
