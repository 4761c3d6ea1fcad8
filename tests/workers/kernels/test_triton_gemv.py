"""Decode steps of a whole model by the step kernel, in Triton's interpreter, against plain forwards by torch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.cache.attention.forward import Batch
from tandem.cache.kernels.base import Capabilities, DeviceTables, Limits
from tandem.cache.kernels.scoring import Scoring
from tandem.cache.kernels.torch.kernels import TorchKernels
from tandem.cache.kinds.kv import KV
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.layout import KVLayout
from tandem.workers.models.registry import load_config
from tandem.workers.models.weights import load_decoder
from tests.support.checkpoints import make_model
from tests.support.tvm_cache import TvmCache

pytest.importorskip("triton")

from tandem.cache.kernels.paged.kernels import TritonKernels
from tandem.cache.kernels.paged.steps import DecodeSteps
from tandem.cache.kernels.triton.decode_plan import DecodePlan

LENGTHS = (5, 12)


class StepKernels(TorchKernels):
    """Forwards by torch, captured steps by the kernel."""

    def __init__(self, pool: Tensor, scoring: Scoring, fp8: Any = None) -> None:
        super().__init__(pool, scoring, fp8)
        self.capabilities = Capabilities(step_graphs=True)

    def buffers(self, limits: Limits, tables: DeviceTables) -> DecodeSteps:
        steps = TritonKernels(self._pool, self.scoring, self._fp8)
        return DecodeSteps(steps, DecodePlan.make(tables, *steps._sizes(limits.num_q_heads)[:3]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_steps.py runs there")
@torch.inference_mode()
def test_logits_equal_those_of_plain_forwards(tmp_path: Path) -> None:
    make_model("qwen3").save_pretrained(tmp_path)
    config = load_config(tmp_path, "float32")
    model = load_decoder(tmp_path, config)
    group = LayerGroup(tuple(range(config.num_layers)), KV(config.num_kv_heads, config.head_dim))
    layout = KVLayout((group,), 8, torch.float32)
    caches = []
    for _ in range(2):
        pool = torch.full((40, *layout.page_shape(0)), torch.nan)
        cache = TvmCache(
            layout, (pool,), max_sequences=4, max_sequence_length=64, rope=config.rope, writer=None, kernels=StepKernels
        )
        for sequence, length in enumerate(LENGTHS):
            cache.add_sequence(sequence)
            plan = cache.begin_forward([sequence], [length])
            model.forward(torch.arange(length) + sequence, plan.attention, torch.tensor([0]))
        caches.append(cache)
    fixed, plain = caches
    (batch,) = fixed.graph_buffers([Limits.of_step(3, config.num_heads, 1)])
    for sequences in ([0, 1], [1]):
        tokens = 3 + np.array(sequences)
        plan = plain.begin_forward(sequences, [1] * len(sequences))
        expected = model.forward(torch.from_numpy(tokens), plan.attention, None)
        fixed.begin(Batch(sequences), batch, [tokens])
        actual = model.forward(batch.inputs[0], batch.attention(), None)
        torch.testing.assert_close(actual[: len(sequences)], expected, rtol=1e-4, atol=1e-4)
