"""The rotary embeddings of a cache's layer groups, and the rotation of one forward."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.cache.kernels.upload import upload
from tandem.cache.plan.arrays import Int64Array
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.rope import RopeParameters, RotaryEmbedding, Rotation
from tandem.cache.plan.tables import TokenLayout


class Rotations:
    """One embedding for each kind of RoPE; groups that share a kind share its table and, in a forward, its factors."""

    def __init__(
        self,
        rope: RopeParameters | Sequence[RopeParameters],
        layout: KVLayout,
        max_positions: int,
        device: torch.device,
    ) -> None:
        """rope: one for all layer groups, or one for each; groups next to others do not use theirs. InvalidArgument
        when a rotary_dim exceeds a head."""
        of_groups = [rope] * len(layout.groups) if isinstance(rope, RopeParameters) else list(rope)
        if len(of_groups) != len(layout.groups):
            raise InvalidArgument(f"rope has {len(of_groups)} entries; the layout has {len(layout.groups)} groups")
        for kind, group in zip(of_groups, layout.groups, strict=True):
            if kind.rope_type != "none":
                group.kind.check_rope(kind.rotary_dim)
        self.device = device
        self.max_positions = max_positions
        kinds = list(dict.fromkeys(of_groups))
        self._embeddings = [
            None if kind.rope_type == "none" else RotaryEmbedding(kind, max_positions, device, layout.dtype)
            for kind in kinds
        ]
        self._of_groups = [kinds.index(kind) for kind in of_groups]
        # Whether the rotation of a position depends on the length of its sequence, in some group.
        self.by_length = any(kind.by_length for kind in kinds)
        # Per group the rotation of indices 0, 1, …, as many as there can be; not by_length.
        self.of_indices = self._to_groups([None if one is None else one.of_indices for one in self._embeddings])

    def at(self, positions: Tensor) -> list[Rotation | None]:
        """Returns each group's rotation at positions, int64 [T] on any device; not by_length."""
        return self._to_groups([None if one is None else one.rotation(positions) for one in self._embeddings])

    def locate(self, tokens: TokenLayout) -> Tensor:
        """Returns where each token stands in its text, int64 [T], on the device."""
        return upload([tokens.rope_positions], self.device)[0]

    def plan(
        self,
        tokens: TokenLayout,
        rope_lengths: Int64Array | None,
        unrotated: NDArray[np.bool_] | None = None,
    ) -> list[Rotation | None]:
        """Returns each group's rotation of a forward's tokens. rope_lengths: see Batch.

        unrotated: bool [T], the tokens that are left as they are; not by_length. None: none are.
        """
        positions = tokens.rope_positions
        if unrotated is not None:
            positions[unrotated] = self.max_positions
        if not self.by_length:
            return self.at(upload([positions], self.device)[0])
        uploaded = upload([positions, self._lengths(tokens, rope_lengths)], self.device)
        return self._to_groups([None if one is None else one.rotation(*uploaded) for one in self._embeddings])

    def _to_groups(self, of_kinds: list[Rotation | None]) -> list[Rotation | None]:
        return [of_kinds[kind] for kind in self._of_groups]

    def _lengths(self, tokens: TokenLayout, rope_lengths: Int64Array | None) -> Int64Array:
        """Returns the length by which each token is rotated, int64 [T]."""
        lengths = tokens.seq_lens.astype(np.int64)
        if rope_lengths is not None:
            lengths = np.maximum(lengths, rope_lengths)
        lengths = lengths[tokens.owners]
        if tokens.trees is not None:  # a node is rotated as if its path came token by token
            lengths[tokens.trees.tokens] = tokens.rope_positions[tokens.trees.tokens] + 1
        return lengths
