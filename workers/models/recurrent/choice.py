"""Chooses the layer that computes a recurrent state."""

from tandem.workers.models.recurrent.fields import DeltaNetConfig, KdaConfig, Mamba2Config, RecurrentConfig
from tandem.workers.models.recurrent.gated_delta_net import GatedDeltaNet
from tandem.workers.models.recurrent.kimi_delta_attention import KimiDeltaAttention
from tandem.workers.models.recurrent.mamba2 import Mamba2
from tandem.workers.models.recurrent.parameters import (
    DeltaNetParameters,
    KdaParameters,
    Mamba2Parameters,
    RecurrentParameters,
)
from tandem.workers.ranks.ranks import Ranks


def prepare_recurrent(
    config: RecurrentConfig, eps: float, parameters: RecurrentParameters, ranks: Ranks
) -> GatedDeltaNet | KimiDeltaAttention | Mamba2:
    """eps: of its norm. parameters: made by allocate_recurrent from the config. ranks: of its shard."""
    if isinstance(config, Mamba2Config) and isinstance(parameters, Mamba2Parameters):
        return Mamba2(config, eps, parameters, ranks)
    if isinstance(config, KdaConfig) and isinstance(parameters, KdaParameters):
        return KimiDeltaAttention(config, eps, parameters)
    assert isinstance(config, DeltaNetConfig)  # there are no others
    assert isinstance(parameters, DeltaNetParameters)
    return GatedDeltaNet(config, eps, parameters)
