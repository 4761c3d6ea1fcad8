"""Which layer computes a recurrent state."""

from tandem.workers.models.recurrent.fields import DeltaNetConfig, RecurrentConfig
from tandem.workers.models.recurrent.gated_delta_net import GatedDeltaNet
from tandem.workers.models.recurrent.parameters import DeltaNetParameters, RecurrentParameters


def prepare_recurrent(config: RecurrentConfig, eps: float, parameters: RecurrentParameters) -> GatedDeltaNet:
    """eps: of its norm. parameters: those that allocate_recurrent made of the config."""
    if isinstance(config, DeltaNetConfig) and isinstance(parameters, DeltaNetParameters):
        return GatedDeltaNet(config, eps, parameters)
    raise NotImplementedError(f"{type(config).__name__} has no layer")
