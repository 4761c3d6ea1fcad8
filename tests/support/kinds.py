"""Reads and changes a layer group's kind for tests."""

from dataclasses import replace
from typing import Any, cast

from tandem.cache.kinds.compressed import Beside
from tandem.cache.kinds.index import IndexKeys
from tandem.cache.kinds.latent import Latent
from tandem.cache.kinds.shared import Shared
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.layout import KVLayout


def latent_rank(group: LayerGroup) -> int | None:
    """Returns how many numbers of a latent entry are not rotated; None if the group keeps K and V."""
    return group.kind.rank if isinstance(group.kind, Latent) else None


def has_latents(layout: KVLayout) -> bool:
    return any(isinstance(group.kind, Latent | IndexKeys) for group in layout.groups)


def is_beside(group: LayerGroup) -> bool:
    return isinstance(group.kind, Beside)


def is_shared(group: LayerGroup) -> bool:
    """Returns whether K and V are the same numbers."""
    return isinstance(group.kind, Shared)


def changed(group: LayerGroup, **fields: Any) -> LayerGroup:
    """Returns the group with these fields of its kind."""
    return replace(group, kind=replace(cast(Any, group.kind), **fields))
