"""Kernels that share whatever can be shared, so that a few tokens of tiny heads take the path of long prefixes."""

from torch import Tensor

from tandem.cache.kernels.base import KernelFactory, Kernels
from tandem.cache.kernels.native_kernels import NativeKernels
from tandem.cache.kernels.torch_kernels import TorchKernels
from tandem.cache.shared_prefixes import SharingRule


ALL = SharingRule(1, 1)


def sharing_all(factory: KernelFactory, rule: SharingRule = ALL) -> KernelFactory:
    """What `factory` makes, with another rule where it shares at all."""

    def make(pool: Tensor, scale: float, window: int | None = None, softcap: float | None = None) -> Kernels:
        kernels = factory(pool, scale, window, softcap)
        assert isinstance(kernels, TorchKernels | NativeKernels)
        if kernels.sharing is not None:
            kernels.sharing = rule
        return kernels

    return make
