"""Kernels that share whatever can be shared, so that a few tokens of tiny heads take the path of long prefixes."""

from dataclasses import replace

from torch import Tensor

from tandem.cache.kernels.base import KernelFactory, KVBackend
from tandem.cache.kernels.fp8_entries import Fp8Entries
from tandem.cache.kernels.scoring import Scoring
from tandem.cache.plan.shared_prefixes import SharingRule

ALL = SharingRule(1, 1)


def sharing_all(factory: KernelFactory, rule: SharingRule = ALL) -> KernelFactory:
    """Makes what `factory` makes, with another rule where it shares at all."""

    def make(pool: Tensor, scoring: Scoring, fp8: Fp8Entries | None = None) -> KVBackend:
        backend = factory(pool, scoring, fp8)
        if backend.capabilities.sharing is not None:
            vars(backend)["capabilities"] = replace(backend.capabilities, sharing=rule)
        return backend

    return make
