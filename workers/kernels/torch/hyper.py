"""The reference of HyperKernels: plain torch, on any device."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.workers.kernels.base import HyperParameters, HyperSettings


class TorchHyperKernels:
    """See HyperKernels."""

    def open(
        self, streams: Tensor, parameters: HyperParameters, settings: HyperSettings
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_streams = streams.shape[1]
        counts = (num_streams, num_streams, num_streams**2)
        weights = _project(streams, parameters.fn, settings.norm_eps).split_with_sizes(counts, 1)
        pre, post, mix = (
            one * scale + base
            for one, scale, base in zip(
                weights, parameters.scale, parameters.base.split_with_sizes(counts), strict=True
            )
        )
        collapsed = ((pre.sigmoid() + settings.eps).unsqueeze(2) * streams).sum(1).to(streams.dtype)
        return collapsed, 2 * post.sigmoid(), _balance(mix.unflatten(1, (num_streams, num_streams)), settings)

    def close(self, streams: Tensor, output: Tensor, post: Tensor, mix: Tensor) -> Tensor:
        dtype = streams.dtype
        mixed = torch.matmul(mix.to(dtype).transpose(1, 2), streams)
        return post.to(dtype).unsqueeze(2) * output.unsqueeze(1) + mixed

    def collapse(self, streams: Tensor, parameters: HyperParameters, settings: HyperSettings) -> Tensor:
        weights = _project(streams, parameters.fn, settings.norm_eps) * parameters.scale
        weights = (weights + parameters.base).sigmoid() + settings.eps
        return (weights.unsqueeze(2) * streams).sum(1).to(streams.dtype)


def _balance(mix: Tensor, settings: HyperSettings) -> Tensor:
    """Rows and columns of about the sum 1, by turns (Sinkhorn and Knopp)."""
    eps = settings.eps
    mix = mix.softmax(2) + eps
    mix = mix / (mix.sum(1, keepdim=True) + eps)
    for _ in range(settings.iterations - 1):
        mix = mix / (mix.sum(2, keepdim=True) + eps)
        mix = mix / (mix.sum(1, keepdim=True) + eps)
    return mix


def _project(streams: Tensor, fn: Tensor, eps: float) -> Tensor:
    """float32 [T, K], of streams [T, N, H], normalised over all N·H numbers, and fn float32 [K, N·H]."""
    flat = streams.flatten(1).float()
    return F.linear(flat * torch.rsqrt(flat.square().mean(1, keepdim=True) + eps), fn)
