"""Measures how much memory torch's operations take for their results."""

from typing import Any

from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode


class MadeTensors(TorchDispatchMode):
    """The memory of all tensors that operations make. They are kept, so that none takes another's address."""

    def __init__(self, *given: Tensor) -> None:
        super().__init__()
        self._given = {one.untyped_storage().data_ptr() for one in given}
        self._made: dict[int, UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and (place := result.untyped_storage().data_ptr()) not in self._given:
            self._made[place] = result.untyped_storage()
        return result

    @property
    def num_bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._made.values())
