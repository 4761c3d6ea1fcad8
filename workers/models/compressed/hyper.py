"""Manifold-constrained hyper-connections: the residual is N streams, which a block collapses, expands and mixes."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.workers.models.compressed.fields import HyperConfig
from tandem.workers.models.compressed.parameters import HyperParameters


class HyperConnection:
    """Around an attention or a feed-forward."""

    def __init__(self, config: HyperConfig, parameters: HyperParameters, norm_eps: float) -> None:
        self._config, self._parameters, self._norm_eps = config, parameters, norm_eps

    def open(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of streams [T, N, H]: what the block takes, [T, H], and float32 post [T, N] and mix [T, N, N] for close()."""
        config, parameters = self._config, self._parameters
        counts = (config.streams, config.streams, config.streams**2)
        weights = _project(streams, parameters.fn, self._norm_eps).split_with_sizes(counts, 1)
        pre, post, mix = (
            one * scale + base
            for one, scale, base in zip(
                weights, parameters.scale, parameters.base.split_with_sizes(counts), strict=True
            )
        )
        collapsed = ((pre.sigmoid() + config.eps).unsqueeze(2) * streams).sum(1).to(streams.dtype)
        return collapsed, 2 * post.sigmoid(), self._balance(mix.unflatten(1, (config.streams, config.streams)))

    def _balance(self, mix: Tensor) -> Tensor:
        """Rows and columns of about the sum 1, by turns (Sinkhorn and Knopp)."""
        eps = self._config.eps
        mix = mix.softmax(2) + eps
        mix = mix / (mix.sum(1, keepdim=True) + eps)
        for _ in range(self._config.iterations - 1):
            mix = mix / (mix.sum(2, keepdim=True) + eps)
            mix = mix / (mix.sum(1, keepdim=True) + eps)
        return mix

    @staticmethod
    def close(streams: Tensor, output: Tensor, post: Tensor, mix: Tensor) -> Tensor:
        """The streams [T, N, H] behind a block that gave output [T, H]: expanded output and mixed streams."""
        dtype = streams.dtype
        mixed = torch.matmul(mix.to(dtype).transpose(1, 2), streams)
        return post.to(dtype).unsqueeze(2) * output.unsqueeze(1) + mixed


class HyperHead:
    """Collapses the streams before the last norm."""

    def __init__(self, config: HyperConfig, parameters: HyperParameters, norm_eps: float) -> None:
        self._eps, self._parameters, self._norm_eps = config.eps, parameters, norm_eps

    def __call__(self, streams: Tensor) -> Tensor:
        weights = _project(streams, self._parameters.fn, self._norm_eps) * self._parameters.scale
        weights = (weights + self._parameters.base).sigmoid() + self._eps
        return (weights.unsqueeze(2) * streams).sum(1).to(streams.dtype)


def _project(streams: Tensor, fn: Tensor, eps: float) -> Tensor:
    """float32 [T, K], of streams [T, N, H], normalised over all N·H numbers, and fn float32 [K, N·H]."""
    flat = streams.flatten(1).float()
    return F.linear(flat * torch.rsqrt(flat.square().mean(1, keepdim=True) + eps), fn)
