"""A decoder whose residual is several streams."""

from collections.abc import MutableMapping

from torch import Tensor

from tandem.workers.checkpoint.errors import UnsupportedFeature
from tandem.workers.kernels.base import FusedGemms, LayerKernels
from tandem.workers.models.blocks.cached_attention import CachedAttention
from tandem.workers.models.compressed.hyper import HyperConnection, HyperHead
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.decoder import DecoderLayer, DenseDecoder
from tandem.workers.models.feed_forward import MixtureOfExperts
from tandem.workers.models.parameters import DecoderParameters
from tandem.workers.ranks.ranks import ALONE, Ranks


class HyperDecoder(DenseDecoder):
    """A DenseDecoder in which each attention and each feed-forward stands in a hyper-connection."""

    def __init__(
        self,
        config: ModelConfig,
        parameters: DecoderParameters,
        kernels: LayerKernels | None = None,
        fused_gemms: FusedGemms | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        hyper, eps = config.hyper, config.rms_norm_eps
        assert hyper is not None  # such a config asks for this decoder
        assert parameters.hyper_head is not None
        self._head = HyperHead(hyper, parameters.hyper_head, eps)
        self._connections: list[tuple[HyperConnection, HyperConnection]] = []
        for layer in parameters.layers:
            assert layer.hyper is not None
            first, second = (HyperConnection(hyper, one, eps) for one in layer.hyper)
            self._connections.append((first, second))
        self._num_streams = hyper.streams
        super().__init__(config, parameters, kernels, fused_gemms, ranks)

    def _hidden(
        self,
        token_ids: Tensor,
        x: Tensor,
        cached: CachedAttention,
        last_rows: Tensor | None,
        tapped: MutableMapping[int, Tensor | None] | None = None,
    ) -> Tensor:
        if tapped is not None:
            raise UnsupportedFeature(f"{self.config.architecture} has no single residual that a drafter could take")
        eps, last = self.config.rms_norm_eps, self.config.num_layers - 1
        streams = x.unsqueeze(1).repeat(1, self._num_streams, 1)
        for index, (layer, (attention, feed_forward)) in enumerate(zip(self._layers, self._connections, strict=True)):
            taken, post, mix = attention.open(streams)
            normed = self._kernels.add_rms_norm(taken, None, layer.norms.before_attention, eps)
            assert layer.attention is not None  # every layer has both blocks
            assert layer.o is not None
            o = layer.attention(normed, index, cached)
            if last_rows is not None and index == last:  # from here on only last_rows matter
                if last_rows.shape[0] == 0:
                    return x[:0]
                rows = [one.index_select(0, last_rows) for one in (streams, o, post, mix, token_ids)]
                streams, o, post, mix, token_ids = rows
            streams = attention.close(streams, layer.o.linear(o), post, mix)
            taken, post, mix = feed_forward.open(streams)
            normed = self._kernels.add_rms_norm(taken, None, layer.norms.before_feed_forward, eps)
            streams = feed_forward.close(streams, self._feed(layer, normed, token_ids), post, mix)
        return self._kernels.add_rms_norm(self._head(streams), None, self._final_norm, eps)

    @staticmethod
    def _feed(layer: DecoderLayer, x: Tensor, token_ids: Tensor) -> Tensor:
        if isinstance(layer.feed_forward, MixtureOfExperts):
            return layer.feed_forward(x, token_ids=token_ids)
        assert layer.feed_forward is not None
        return layer.feed_forward(x)
