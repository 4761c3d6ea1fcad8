"""Manifold-constrained hyper-connections: the residual is N streams, which a block collapses, expands and mixes."""

from torch import Tensor

from tandem.workers.kernels.base import HyperParameters, HyperSettings
from tandem.workers.kernels.choice import choose_hyper_kernels
from tandem.workers.models.compressed.fields import HyperConfig


class HyperConnection:
    """A hyper-connection around an attention or a feed-forward."""

    def __init__(self, config: HyperConfig, parameters: HyperParameters, norm_eps: float) -> None:
        self._kernels = choose_hyper_kernels(parameters.fn.device, config.streams)
        self._parameters = parameters
        self._settings = HyperSettings(config.iterations, config.eps, norm_eps)

    def open(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns for streams [T, N, H] the block's input, [T, H], and float32 post [T, N] and mix [T, N, N] for
        close()."""
        return self._kernels.open(streams, self._parameters, self._settings)

    def close(self, streams: Tensor, output: Tensor, post: Tensor, mix: Tensor) -> Tensor:
        """The streams [T, N, H] after a block that gave output [T, H]: expanded output and mixed streams."""
        return self._kernels.close(streams, output, post, mix)


class HyperHead:
    """Collapses the streams before the last norm."""

    def __init__(self, config: HyperConfig, parameters: HyperParameters, norm_eps: float) -> None:
        self._kernels = choose_hyper_kernels(parameters.fn.device, config.streams)
        self._parameters = parameters
        self._settings = HyperSettings(config.iterations, config.eps, norm_eps)

    def __call__(self, streams: Tensor) -> Tensor:
        return self._kernels.collapse(streams, self._parameters, self._settings)
