"""LoRA adapters by torch, slot after slot. Reads on the host which slots there are."""

from itertools import pairwise

from torch import Tensor

from tandem.workers.kernels.adapter_linear import AdapterKernels, AdapterMatrices


class TorchAdapters(AdapterKernels):
    """The reference of AdapterKernels."""

    def add(self, y: Tensor, x: Tensor, matrices: AdapterMatrices, slots: Tensor) -> None:
        """See AdapterKernels."""
        rank = matrices.rank
        for slot in slots.unique().tolist():
            if slot < 0:
                continue
            rows = (slots == slot).nonzero().squeeze(1)
            low = x.index_select(0, rows).float() @ matrices.a[slot].float().T
            added = y.index_select(0, rows).float()
            for part, (begin, end) in enumerate(pairwise((0, *matrices.ends))):
                b = matrices.b[slot, begin:end].float()
                added[:, begin:end] += low[:, part * rank : (part + 1) * rank] @ b.T
            y.index_copy_(0, rows, added.to(y.dtype))

    def compile(self, matrices: AdapterMatrices) -> None:
        """Compiles nothing."""
