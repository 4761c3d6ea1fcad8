"""Parameters whose quantized weights are dequantized, for comparisons by the names of tensors."""

import dataclasses
from typing import Any, TypeVar

import torch

from tandem.workers.weights.dense import Dense, DenseStack

T = TypeVar("T")


def in_dense(value: T) -> T:
    """Returns the parameters with dense weights. Dense or shared weights stay unchanged."""
    return _in_dense(value)


def _in_dense(value: Any) -> Any:
    if isinstance(value, Dense | DenseStack | torch.Tensor):
        return value
    if hasattr(value, "tensor"):
        return Dense(value.tensor(), value.tensors().get("bias"))
    if hasattr(value, "one"):
        weights = [value.one(index).tensor() for index in range(value.count)]
        return DenseStack(torch.stack(weights), value.tensors().get("bias"))
    if isinstance(value, list | tuple):
        return type(value)(_in_dense(one) for one in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _in_dense(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value
