"""One token at a time through SmallBatchDecoder, against the decoder of any number of tokens."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tandem.workers.kernels.base import Linear
from tandem.workers.models.decoder import DenseDecoder
from tandem.workers.models.registry import load_config
from tandem.workers.models.weights import load_parameters
from tests.support.checkpoints import make_model
from tests.support.fused_gemms import TorchFusedGemms
from tests.workers.reference_attention import ReferenceAttention, Sequence


class CountingKernels(TorchFusedGemms):
    def __init__(self) -> None:
        self.calls = 0

    def add_linear(self, residual: Tensor, x: Tensor, weights: Linear) -> None:
        self.calls += 1
        super().add_linear(residual, x, weights)


@pytest.mark.parametrize(("family", "fits"), [("qwen3", True), ("llama", True), ("qwen2", True), ("gemma2", False)])
@torch.inference_mode()
def test_logits_equal_those_of_the_whole_decoder(family: str, fits: bool, tmp_path: Path) -> None:
    make_model(family).save_pretrained(tmp_path)
    config = load_config(tmp_path, "float32")
    kernels = CountingKernels()
    lone = DenseDecoder(config, load_parameters(tmp_path, config), fused_gemms=kernels)
    whole = DenseDecoder(config, load_parameters(tmp_path, config))
    logits: list[Tensor] = []
    for decoder in (lone, whole):
        attention, sequence = ReferenceAttention(config), Sequence(5)
        attention.batch = [(sequence, 5)]
        decoder.forward(torch.arange(5), attention, torch.tensor([4]))
        attention.batch = [(sequence, 1)]
        steps = [decoder.forward(torch.tensor([token]), attention, None) for token in (7, 3, 11)]
        logits.append(torch.cat(steps))
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
    assert kernels.calls == (2 * 3 * config.num_layers if fits else 0)
