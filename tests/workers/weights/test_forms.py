"""Models whose weights memory holds in another form than Dense, which no layer may notice."""

import dataclasses
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.workers.kernels.expert_blocks import ExpertBlocks
from tandem.workers.models.compressed.decoder import HyperDecoder
from tandem.workers.models.decoder import DenseDecoder
from tandem.workers.models.parameters import AttentionParameters, MoeParameters, allocate_parameters
from tandem.workers.models.registry import load_config
from tandem.workers.models.weight_names import named_weights
from tandem.workers.models.weights import load_parameters
from tandem.workers.weights.allocator import Allocator, Form
from tandem.workers.weights.dense import Dense, DenseStack
from tandem.workers.weights.weight import Weight, WeightStack
from tests.support.checkpoints import save_checkpoint
from tests.support.fused_gemms import TorchFusedGemms
from tests.support.oracle import random_prompt
from tests.workers.reference_attention import ReferenceAttention, Sequence

FAMILIES = (
    "llama",
    "llama-tied",
    "mixtral",
    "gpt_oss",
    "gemma4",
    "llama4",
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v4",
)


@dataclasses.dataclass(frozen=True, eq=False)
class Wide(Weight):
    """Numbers in float64."""

    numbers: Tensor
    bias: Tensor | None

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def device(self) -> torch.device:
        return self.numbers.device

    @property
    def rows(self) -> int:
        return self.numbers.shape[0]

    @property
    def columns(self) -> int:
        return self.numbers.shape[1]

    def tensors(self) -> dict[str, Tensor]:
        return {"numbers": self.numbers} if self.bias is None else {"numbers": self.numbers, "bias": self.bias}

    def slice(self, begin: int, end: int) -> "Wide":
        return Wide(self.numbers[begin:end], None if self.bias is None else self.bias[begin:end])

    def tensor(self) -> Tensor:
        return self.numbers.to(self.dtype)

    def linear(self, x: Tensor) -> Tensor:
        return F.linear(x.double(), self.numbers, self.bias).to(x.dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class WideStack(WeightStack):
    """Numbers in float64."""

    weights: tuple[Wide, ...]

    @property
    def device(self) -> torch.device:
        return self.weights[0].device

    @property
    def count(self) -> int:
        return len(self.weights)

    def tensors(self) -> dict[str, Tensor]:
        return {name: torch.stack([one.tensors()[name] for one in self.weights]) for name in self.weights[0].tensors()}

    def one(self, index: int) -> Wide:
        return self.weights[index]

    def prepare(self) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.stack([one.linear(rows) for one, rows in zip(self.weights, x, strict=True)])

    def grouped(self, x: Tensor, blocks: ExpertBlocks, scale: Tensor | None, fan_out: int) -> Tensor:
        raise NotImplementedError("a CPU loops over experts")


def widened(value: Any, known: dict[int, Any]) -> Any:
    """The same parameters, with weights in float64. known: by id, so that what was one weight stays one."""
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, Dense):
        known[id(value)] = Wide(value.weight.double(), None if value.bias is None else value.bias.double())
        return known[id(value)]
    if isinstance(value, DenseStack):
        return WideStack(tuple(widened(value.one(index), {}) for index in range(value.count)))
    if isinstance(value, list | tuple):
        return type(value)(widened(one, known) for one in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: widened(getattr(value, field.name), known) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value


@pytest.mark.parametrize("case", FAMILIES)
def test_no_layer_asks_in_which_form_a_weight_is(case: str, tmp_path: Path) -> None:
    config = load_config(save_checkpoint(case, tmp_path), "float32")
    decoder = DenseDecoder if config.hyper is None else HyperDecoder
    prompt, logits = torch.tensor(random_prompt(40, 0)), []
    for form in (lambda parameters: parameters, lambda parameters: widened(parameters, {})):
        model = decoder(config, form(load_parameters(tmp_path, config)), fused_gemms=TorchFusedGemms())
        attention = ReferenceAttention(config)
        attention.batch = [(Sequence(40), 40)]
        with torch.inference_mode():
            logits.append(model.forward(prompt, attention, torch.arange(40)))
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)


def test_a_checkpoint_fills_whatever_a_weight_holds(tmp_path: Path) -> None:
    """It goes by the names of its tensors, and by rows where weights are fused."""
    config = load_config(save_checkpoint("llama", tmp_path), "float32")
    names = named_weights(config, widened(load_parameters(tmp_path, config), {}))
    prefix, rows = "model.layers.0.self_attn", config.num_kv_heads * config.head_dim
    assert names[f"{prefix}.k_proj.numbers"].shape == names[f"{prefix}.v_proj.numbers"].shape
    assert names[f"{prefix}.v_proj.numbers"].shape == (rows, config.hidden_size)
    assert names["lm_head.numbers"].dtype == torch.float64
    assert not [name for name in names if name.endswith("_proj.weight")]


class WideForm(Form):
    def weight(self, new: Allocator, rows: int, columns: int, bias: Tensor | None) -> Wide:
        return Wide(new(rows, columns).double(), bias)

    def stack(
        self, new: Allocator, count: int, rows: int, columns: int, bias: Tensor | None, *, transposed: bool
    ) -> WideStack:
        return WideStack(tuple(self.weight(new, rows, columns, bias) for _ in range(count)))


def test_forms_are_of_layers_and_experts_but_not_of_embeddings_heads_and_routers(tmp_path: Path) -> None:
    config = load_config(save_checkpoint("mixtral", tmp_path), "float32")
    parameters = allocate_parameters(config, torch.device("cpu"), repeat(WideForm()))
    layer = parameters.layers[0]
    assert isinstance(layer.attention, AttentionParameters)
    assert isinstance(layer.feed_forward, MoeParameters)
    moe = layer.feed_forward
    assert {type(one) for one in (layer.attention.qkv, layer.attention.o)} == {Wide}
    assert {type(one) for one in (moe.gate_up, moe.down)} == {WideStack}
    assert {type(one) for one in (parameters.embedding, parameters.lm_head, moe.router)} == {Dense}
