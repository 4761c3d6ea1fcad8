"""The plainest `attend` for the decoder: every sequence keeps its own K and V, and softmax is written out."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tandem.cache.kernels.base import Compression, Index, IndexQuery
from tandem.cache.kernels.recurrent import RecurrentInputs
from tandem.cache.plan.head_norm import HeadNorm
from tandem.cache.plan.latent import UpProjections
from tandem.cache.plan.rope import RotaryEmbedding
from tandem.cache.plan.temperature import Temperature
from tandem.workers.models.config import ModelConfig
from tests.support.naive_states import naive_outputs
from tests.workers.reference_compressed import Fed
from tests.workers.reference_compressed import attend as attend_shared


@dataclass
class Sequence:
    """prompt_length is what dynamic RoPE looks at; cached is the number of positions before this forward."""

    prompt_length: int
    cached: int = 0
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    index_keys: dict[int, Tensor] = field(default_factory=dict)
    chosen: Tensor | None = None
    compressed: dict[int, Fed] = field(default_factory=dict)
    fed: dict[int, RecurrentInputs] = field(default_factory=dict)  # by layer, all inputs of a recurrent state


class ReferenceAttention:
    """Set `batch` to the (sequence, number of new tokens) pairs of the next forward, then pass this to it."""

    def __init__(self, config: ModelConfig, max_positions: int = 512) -> None:
        self._config = config
        self._scale = config.attn_scale or config.head_dim**-0.5
        self._spans = config.layer_spans
        attends = (index for index, span in enumerate(self._spans) if config.has_mixer(index) and not span.last)
        self._last = max(
            attends
        )  # what it takes in of a sequence has been taken in by all layers that look at `cached`
        ropes = (config.rope, config.local_rope or config.rope)
        self._rotary = [
            None
            if rope.rope_type == "none"
            else RotaryEmbedding(rope, max_positions, torch.device("cpu"), torch.float32)
            for rope in ropes
        ]
        self.batch: list[tuple[Sequence, int]] = []

    def step_pages(self, layers: range) -> None:
        """There are none."""

    def temperatures(self, rule: Temperature) -> Tensor:
        """See CachedAttention."""
        begins = [(sequence.cached, sequence.cached + count) for sequence, count in self.batch]
        return rule.factors(torch.cat([torch.arange(begin, end) for begin, end in begins]))

    def attend_shared(
        self, layer: int, q: Tensor, kv: Tensor, sinks: Tensor, compression: Compression | None = None
    ) -> Tensor:
        """See CachedAttention."""
        config, begin, outputs = self._config.compressed, 0, []
        assert config is not None
        rotary = self._rotary[config.every(layer) is None]
        assert rotary is not None
        for sequence, count in self.batch:
            rows = slice(begin, begin + count)
            its = compression
            if compression is not None:
                query = None if compression.query is None else IndexQuery(*(x[rows] for x in compression.query))
                its = compression._replace(values=compression.values[rows], gates=compression.gates[rows], query=query)
            fed = sequence.compressed.setdefault(layer, Fed())
            outputs.append(attend_shared(config, layer, rotary, fed, q[rows], kv[rows], sinks, its))
            begin += count
        return torch.cat(outputs)

    def attend_latents(
        self, layer: int, q: Tensor, latents: Tensor, keys: Tensor, up: UpProjections, choice: Index | None = None
    ) -> Tensor:
        """K and V are made of the latents at once, and kept."""
        if choice is not None:
            self._choose(layer, choice)
        made = torch.einsum("tr,hdr->thd", latents, up.weight)
        k, v = made.split((up.heads.key_dim, up.heads.value_dim), 2)
        return self.attend(layer, q, torch.cat([k, keys[:, None].expand(-1, k.shape[1], -1)], 2), v, None, None)

    def _choose(self, layer: int, choice: Index) -> None:
        """Notes what each token of the batch attends to in this layer and in layers without an index: bool [n,
        positions]."""
        assert self._config.latent is not None
        assert self._config.latent.index is not None
        rotary, top_k, begin = self._rotary[0], self._config.latent.index.top_k, 0
        assert rotary is not None
        for sequence, count in self.batch:
            q, still, rotated, weights = (x[begin : begin + count] for x in choice)
            cos, sin = (x.to(q.dtype)[:, None] for x in rotary.cos_sin(sequence.cached + torch.arange(count)))
            q = rotate(q, cos, sin, still.shape[1])
            keys = torch.cat((still, rotate(rotated[:, None], cos, sin)[:, 0]), 1)
            keys = sequence.index_keys[layer] = torch.cat((sequence.index_keys.get(layer, keys[:0]), keys))
            scores = torch.einsum("nh,nhm->nm", weights, torch.einsum("nhd,md->nhm", q.float(), keys.float()).relu())
            scores = scores.masked_fill(torch.ones_like(scores).triu(sequence.cached + 1) > 0, -torch.inf)
            best = scores.topk(min(top_k, keys.shape[0])).indices
            sequence.chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, best, True)
            begin += count

    def recur(self, layer: int, x: RecurrentInputs) -> Tensor:
        """The state is made anew each time, of all that it was ever given."""
        assert self._config.recurrent is not None
        outputs, begin = [], 0
        for sequence, count in self.batch:
            new = x._replace(**{name: getattr(x, name)[begin : begin + count] for name in OF_TOKENS})
            held = sequence.fed.get(layer)
            if held is not None:
                new = x._replace(**{name: torch.cat((getattr(held, name), getattr(new, name))) for name in OF_TOKENS})
            sequence.fed[layer] = new
            outputs.append(naive_outputs(self._config.recurrent.shape, new)[-count:].to(x.mixed.dtype))
            begin += count
        return torch.cat(outputs)

    def read(self, layer: int, q: Tensor, sinks: Tensor | None, norm: HeadNorm | None) -> Tensor:
        """Attends to K and V of the layer that is read, and adds none."""
        none = q.new_empty((q.shape[0], 0, q.shape[2]))
        q = q if norm is None else norm.apply_to_queries(q)
        return self._attend_all(layer, q, none, none, sinks)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, norm: HeadNorm | None
    ) -> Tensor:
        if norm is not None:
            q, k = norm.apply(q, k)
        return self._attend_all(layer, q, k, v, sinks)

    def _attend_all(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        outputs, begin = [], 0
        for sequence, count in self.batch:
            rows = slice(begin, begin + count)
            outputs.append(self._attend_one(sequence, layer, q[rows], k[rows], v[rows], sinks))
            begin += count
            if layer == self._last:
                sequence.cached += count
        return torch.cat(outputs)

    def _attend_one(
        self, sequence: Sequence, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> Tensor:
        config, count, span = self._config, q.shape[0], self._spans[layer]
        positions = torch.arange(sequence.cached, sequence.cached + count)
        lengths = torch.clamp(positions + 1, min=sequence.prompt_length)
        rotary = self._rotary[span.drops_past]
        if rotary is not None:
            cos, sin = (table.to(q.dtype)[:, None] for table in rotary.cos_sin(positions, lengths))
            first = 0 if config.latent is None else config.latent.heads.key_dim
            q, k = rotate(q, cos, sin, first), rotate(k, cos, sin, first)
        if layer in config.readers:
            k, v = sequence.keys[config.readers[layer]], sequence.values[config.readers[layer]]
        elif layer in sequence.keys:
            k, v = torch.cat([sequence.keys[layer], k]), torch.cat([sequence.values[layer], v])
        sequence.keys[layer], sequence.values[layer] = k.clone(), v.clone()
        group = config.num_heads // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k).float() * self._scale
        if config.attn_softcap is not None:
            scores = config.attn_softcap * torch.tanh(scores / config.attn_softcap)
        others = torch.arange(k.shape[0])[None]
        firsts = torch.from_numpy(span.first_needed(positions.numpy()))
        hidden = (others > positions[:, None]) | (others < firsts[:, None])
        if sequence.chosen is not None:
            hidden = hidden | ~sequence.chosen
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, count, 1)], -1)
        weights = scores.softmax(-1)[..., : k.shape[0]].to(v.dtype)
        return torch.einsum("hqk,khd->qhd", weights, v)


OF_TOKENS = ("mixed", "log_decay", "strength")  # fields of RecurrentInputs with a row for each token


def rotate(x: Tensor, cos: Tensor, sin: Tensor, begin: int = 0) -> Tensor:
    """x [T, heads, D]; cos and sin [T, 1, d]: of d numbers from `begin` on."""
    size = cos.shape[-1]
    before, x, after = x.split((begin, size, x.shape[-1] - begin - size), -1)
    first, second = x.chunk(2, -1)
    return torch.cat([before, x * cos + torch.cat([-second, first], -1) * sin, after], -1)
