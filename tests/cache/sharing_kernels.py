"""Kernels that share whatever can be shared, so that a few tokens of tiny heads take the path of long prefixes."""

from torch import Tensor

from tandem.cache.kernels.base import KernelFactory, Kernels, SharingKernels
from tandem.cache.kernels.fp8_entries import Fp8Entries
from tandem.cache.shared_prefixes import SharingRule

ALL = SharingRule(1, 1)


def sharing_all(factory: KernelFactory, rule: SharingRule = ALL) -> KernelFactory:
    """What `factory` makes, with another rule where it shares at all."""

    def make(
        pool: Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        fp8: Fp8Entries | None = None,
    ) -> Kernels:
        kernels = factory(pool, scale, window, softcap, fp8)
        assert isinstance(kernels, SharingKernels)
        if kernels.sharing is not None:
            vars(kernels)["sharing"] = rule
        return kernels

    return make
