"""The pre-norm decoder that all families share: norms, attention and a feed-forward in a layer, or one of both."""

import dataclasses
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tandem.cache.kernels.upload import upload
from tandem.cache.plan.rope import RotaryEmbedding
from tandem.workers.checkpoint.errors import UnsupportedFeature
from tandem.workers.kernels.base import FusedGemms, LayerKernels
from tandem.workers.kernels.choice import choose_fused_gemms, choose_layer_kernels
from tandem.workers.kernels.skinny_gemm.streamed import StreamedGemm
from tandem.workers.models.attention import AttentionBlock, GroupedQueryAttention, prepare_attention
from tandem.workers.models.blocks.bidirectional import Bidirectional
from tandem.workers.models.blocks.cached_attention import CachedAttention, EncoderStore
from tandem.workers.models.blocks.cross_attention import CrossAttention
from tandem.workers.models.blocks.experts_beside import ExpertsBeside
from tandem.workers.models.blocks.layer_inputs import LayerTail, PerLayerInputs
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.feed_forward import FeedForward, GatedFeedForward, prepare_feed_forward
from tandem.workers.models.parameters import DecoderParameters, LayerNorms, LayerParameters
from tandem.workers.models.small_batch_decoder import SmallBatchDecoder
from tandem.workers.models.weight_names import is_norm, named_weights
from tandem.workers.ranks.ranks import ALONE, Ranks, prepare_summed
from tandem.workers.weights.adapted import AdapterRows
from tandem.workers.weights.weight import Projection


class Decoder(Protocol):
    """The model of a runner: a DenseDecoder, or a decoder with more around it."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def device(self) -> torch.device: ...

    def forward(self, token_ids: Tensor, cached: CachedAttention, last_rows: Tensor | None) -> Tensor:
        """See DenseDecoder.forward."""
        ...

    @property
    def follow(self) -> Callable[[Tensor, CachedAttention], Tensor] | None:
        """Computes more after a step's tokens are sampled, see HeadedDecoder.follow; None: nothing."""
        ...

    @property
    def begin_prompts(
        self,
    ) -> Callable[[Tensor, CachedAttention, Tensor], tuple[Tensor, Callable[[Tensor], None]]] | None:
        """forward() of prompts, without what a drafter computes. That is the second result. It is called once with the
        tokens sampled for last_rows, int64 [n or more]. None: forward() leaves nothing to compute."""
        ...


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer as it is run, or one of its blocks. attention and o are there together. Offsets of norms are in
    their weights."""

    norms: LayerNorms
    attention: AttentionBlock | None
    o: Projection | None
    feed_forward: FeedForward | None
    beside: ExpertsBeside | None = None
    tail: LayerTail | None = None
    cross: CrossAttention | None = None


class DenseDecoder:
    """The decoder that all families share. Call forward under torch.inference_mode."""

    target = None  # of a model that drafts, too: what computes steps without its drafter
    follow = begin_prompts = None  # see Decoder

    def __init__(
        self,
        config: ModelConfig,
        parameters: DecoderParameters,
        kernels: LayerKernels | None = None,
        fused_gemms: FusedGemms | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """Takes over filled `parameters` and empties their list of layers, so that no weight is held twice.

        kernels, fused_gemms: None takes the fastest for the parameters' device. ranks: of the config's shard, else
        UnsupportedFeature.
        """
        if (config.shard.rank, config.shard.size) != (ranks.rank, ranks.size):
            raise UnsupportedFeature(
                f"the shard is rank {config.shard.rank} of {config.shard.size}; it must be that of this worker, rank "
                f"{ranks.rank} of {ranks.size}"
            )
        self.config, self.ranks = config, ranks
        self.adapted = parameters.adapted
        self._adapter_rows = AdapterRows() if self.adapted is None else self.adapted.rows
        self._kernels = kernels or choose_layer_kernels(parameters.embedding.device, config.dtype)
        self._embedding = parameters.embedding
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=config.dtype))  # transformers rounds
        self._final_norm = parameters.final_norm
        self._per_layer: PerLayerInputs | None = None
        if parameters.per_layer is not None:
            self._per_layer = PerLayerInputs(config, parameters.per_layer, self._kernels)
        self._encoder: Encoder | None = None
        if parameters.encoder is not None and config.encoder is not None:
            own = DenseDecoder(config.encoder, parameters.encoder, self._kernels, ranks=ranks)
            self._encoder = Encoder(config.encoder, own)
            parameters = dataclasses.replace(parameters, encoder=None)  # whose norms have their offset
        for name, weight in named_weights(config, parameters).items():
            if is_norm(name):
                weight.add_(config.norm_offset)
        self._lm_head = prepare_head(config, parameters)
        self._small_batch_decoder: SmallBatchDecoder | None = None
        fused_gemms = fused_gemms or choose_fused_gemms(self.device, config.dtype)
        lm_head, fits = parameters.lm_head.plain(), partial(SmallBatchDecoder.fits, config)
        all_fit = ranks.size == 1 and all(map(fits, parameters.layers))
        if fused_gemms is not None and lm_head is not None and all_fit:
            self._small_batch_decoder = SmallBatchDecoder(config, fused_gemms, self._final_norm, lm_head)
        self._layers: list[DecoderLayer] = []
        while parameters.layers:
            layer = parameters.layers.pop(0)
            self._layers.append(prepare_layer(config, len(self._layers), layer, self._kernels, ranks))
            attention = self._layers[-1].attention
            if self._small_batch_decoder is not None and attention is not None:
                self._small_batch_decoder.add_layer(layer, attention)
        self._last_mixer = max(filter(config.has_mixer, range(config.num_layers)))

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    def forward(self, token_ids: Tensor, cached: CachedAttention, last_rows: Tensor | None) -> Tensor:
        """Logits [n, vocab_size] that follow rows `last_rows` (int64 [n], n may be 0) of the packed tokens: in the
        model's dtype, as the last product leaves them, or float32 where the model caps them.

        token_ids: int64 [T], the new tokens of all sequences of the batch one after another. last_rows None: all T.
        """
        x = self.embed(token_ids)
        if (small := self._small_batches) is not None and last_rows is None:
            found = small.forward(x, cached)
            if found is not None:
                return self._cap(found[0])
        return self.logits(self._hidden(token_ids, x, cached, last_rows))

    def hidden(self, token_ids: Tensor, cached: CachedAttention, rows: Tensor | None) -> Tensor:
        """Returns the input of logits(), [n, hidden_size], for rows `rows` (int64 [n]; None: all) of the packed tokens.
        Otherwise like forward()."""
        return self._hidden(token_ids, self.embed(token_ids), cached, rows)

    def tapped(
        self, token_ids: Tensor, cached: CachedAttention, last_rows: Tensor | None, taps: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """hidden() of last_rows, and what the layers `taps`, ascending and at least one, take from those before,
        [T, taps · hidden], one after another."""
        found: dict[int, Tensor | None] = dict.fromkeys(taps)
        hidden = self._hidden(token_ids, self.embed(token_ids), cached, last_rows, found)
        return hidden, torch.cat([one for one in found.values() if one is not None], 1)

    def tapped_step(self, token_ids: Tensor, cached: CachedAttention, taps: Sequence[int]) -> tuple[Tensor, Tensor]:
        """forward() of a step, and what the layers `taps`, not the first, take: see tapped()."""
        if (small := self._small_batches) is not None:
            found = small.forward(self.embed(token_ids), cached, taps)
            if found is not None and found[1] is not None:
                return self._cap(found[0]), found[1]
        hidden, features = self.tapped(token_ids, cached, None, taps)
        return self.logits(hidden), features

    @property
    def _small_batches(self) -> SmallBatchDecoder | None:
        """None also where the next forward has adapters, which its kernels do not add."""
        return self._small_batch_decoder if self._adapter_rows.slots is None else None

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, vocab_size] after hidden [n, hidden_size], as forward() gives them."""
        if hidden.shape[0] == 0:
            return hidden.new_empty((0, self.config.vocab_size))
        logits = self._lm_head.linear(hidden)
        return self._cap(self.ranks.gather(logits, self.config.vocab_size))

    def _hidden(
        self,
        token_ids: Tensor,
        x: Tensor,
        cached: CachedAttention,
        last_rows: Tensor | None,
        tapped: MutableMapping[int, Tensor | None] | None = None,
    ) -> Tensor:
        """x: the embeddings [T, H], overwritten. tapped: gets, for the layers that it has, what they take from those
        before."""
        kernels, eps, delta, last = self._kernels, self.config.rms_norm_eps, None, self._last_mixer
        inputs = None if self._per_layer is None else self._per_layer(token_ids, x)
        for index, layer in enumerate(self._layers):
            if layer.attention is not None and layer.o is not None:
                normed = kernels.add_rms_norm(x, delta, layer.norms.before_attention, eps)
                if tapped is not None and index in tapped:
                    tapped[index] = x.clone()  # later layers add to it
                o = layer.attention(normed, index, cached)
                if last_rows is not None and last_rows.shape[0] == 0 and index == last - self.config.num_readers:
                    return x[:0]  # all K and V are kept
                project, behind = layer.o, layer.norms.behind_attention
                if layer.cross is not None:
                    o = self._cross(layer.cross, x, self._norm_if(project.linear(o), behind), cached)
                    project, behind = layer.cross.o, layer.cross.behind
                if last_rows is not None and index == last:  # from here on only last_rows matter
                    x, o = x.index_select(0, last_rows), o.index_select(0, last_rows)
                    self._adapter_rows.keep(last_rows)
                    inputs = None if inputs is None else inputs.index_select(0, last_rows)
                delta = self._norm_if(project.linear(o), behind)
            if layer.feed_forward is not None:
                delta = layer.feed_forward(kernels.add_rms_norm(x, delta, layer.norms.before_feed_forward, eps))
                if layer.beside is not None:
                    delta = layer.beside(x, delta)
                delta = self._norm_if(delta, layer.norms.behind_feed_forward)
            if layer.tail is not None and delta is not None:
                layer.tail(x, delta, None if inputs is None else inputs[:, index])
                delta = None
        return kernels.add_rms_norm(x, delta, self._final_norm, eps)

    def _cross(self, cross: CrossAttention, x: Tensor, delta: Tensor, cached: CachedAttention) -> Tensor:
        """Returns o of x [T, H], to which delta is added in place."""
        return cross(self._kernels.add_rms_norm(x, delta, cross.before, self.config.rms_norm_eps), cached)

    def encode(self, token_ids: Tensor, lengths: Sequence[int], borders: Sequence[int], cached: EncoderStore) -> None:
        """Stores what an encoder's output means to each layer. token_ids: int64 [Σ lengths], of whole prompts; borders:
        positions that each takes up, padding included. Only where the config has an encoder."""
        assert self._encoder is not None, "the model has no encoder"
        encoded = self._encoder(token_ids, lengths, borders)
        for layer in self._layers:
            assert layer.cross is not None
            layer.cross.store(encoded, cached)

    def draft_steps(self) -> None:
        """Returns None: it has no drafter."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeds int64 [T] to a new tensor [T, hidden_size]."""
        x = self._embedding.look_up(token_ids)
        return x if self._embedding_scale == 1 else x.mul_(self._embedding_scale)

    def _norm_if(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else self._kernels.add_rms_norm(x, None, weight, self.config.rms_norm_eps)

    def _cap(self, logits: Tensor) -> Tensor:
        cap = self.config.final_softcap
        return logits if cap is None else logits.float().div_(cap).tanh_().mul_(cap)


def prepare_head(config: ModelConfig, parameters: DecoderParameters) -> Projection:
    """The product that gives the logits of the tokens in the shard's part of the vocabulary."""
    if parameters.lm_head is not parameters.embedding:
        return parameters.lm_head.prepare()
    if len(config.head_part) == config.vocab_size:
        return parameters.embedding.prepare(shared=True)
    return parameters.embedding.slice(config.head_part.start, config.head_part.stop).prepare(shared=True)


def prepare_layer(
    config: ModelConfig, index: int, layer: LayerParameters, kernels: LayerKernels, ranks: Ranks
) -> DecoderLayer:
    """index: of the layer in the model of `config`."""
    attention = o = feed_forward = None
    if layer.attention is not None:
        attention = prepare_attention(config, index, layer.attention, kernels, ranks)
        o = prepare_summed(layer.attention.o, ranks)
    if layer.feed_forward is not None:
        alone = layer.norms.behind_feed_forward is None
        feed_forward = prepare_feed_forward(config, layer.feed_forward, kernels, ranks, in_parts=alone)
    if isinstance(attention, GroupedQueryAttention) and isinstance(feed_forward, GatedFeedForward) and o is not None:
        StreamedGemm.chain([attention.qkv.streamed_gemm, o.streamed_gemm, *feed_forward.streamed_gemms])
    beside = tail = None
    if layer.beside is not None and config.moe is not None:
        beside = ExpertsBeside(config, config.moe, layer.beside, kernels, ranks)
    if layer.per_layer is not None or layer.scalar is not None:
        tail = LayerTail(config, layer, kernels)
    cross = None if layer.cross is None else CrossAttention(config, index, layer.cross, ranks)
    return DecoderLayer(layer.norms, attention, o, feed_forward, beside, tail, cross)


class Encoder:
    """decoder: runs the encoder's layers. Its logits are not used."""

    def __init__(self, config: ModelConfig, decoder: DenseDecoder) -> None:
        self._config, self._decoder = config, decoder
        self._rotary = RotaryEmbedding(config.rope, config.max_positions, decoder.device, config.dtype)

    def __call__(self, token_ids: Tensor, lengths: Sequence[int], borders: Sequence[int]) -> Tensor:
        """Its output [Σ borders, H], 0 where that is padding. See DenseDecoder.encode."""
        ends = np.cumsum(borders)
        positions = np.concatenate([np.arange(length) for length in lengths])
        rows = positions + np.repeat(ends - np.array(borders), lengths)
        of_prompts, rows_of = upload([positions, rows], self._decoder.device)
        attention = Bidirectional(self._config, self._rotary, lengths, of_prompts)
        hidden = self._decoder.hidden(token_ids, attention, None)
        return hidden.new_zeros(int(ends[-1]), hidden.shape[1]).index_copy_(0, rows_of, hidden)
