"""Decode steps of a whole model by the step kernel, in Triton's interpreter, against plain forwards by torch."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.cache.kernels.base import DeviceTables
from tandem.cache.kernels.torch.kernels import TorchKernels
from tandem.cache.paged_cache import PagedKVCache
from tandem.cache.plan.head_norm import HeadNorm
from tandem.cache.plan.layout import KVLayout, LayerGroup
from tandem.cache.plan.rope import Rotation
from tandem.cache.plan.tables import PageTables
from tandem.workers.models.registry import load_config
from tandem.workers.models.weights import load_decoder
from tandem.workers.runner.planned_attention import PlannedAttention
from tests.support.checkpoints import make_model

pytest.importorskip("triton")

from tandem.cache.kernels.triton.decode import DecodePlan, decode

LENGTHS = (5, 12)


class StepKernels(TorchKernels):
    """StepKernels: forwards by torch, fixed steps by the kernel."""

    def fixed_plan(self, tables: DeviceTables, num_q_heads: int) -> DecodePlan:
        plan = DecodePlan.make(tables, num_q_heads, self._pool.shape[3], self._pool.shape[5])
        return replace(plan, splits=1)  # the interpreter takes time for idle programs too

    def refill(self, plan: DecodePlan, tables: PageTables) -> None:
        """The kernel reads all that it needs on the device."""

    def step(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rotation: Rotation | None,
        plan: DecodePlan,
        sinks: Tensor | None,
        norm: HeadNorm | None,
    ) -> Tensor:
        return decode(self._pool, layer, q, k, v, rotation, plan, self.scoring, sinks, norm)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_steps.py runs there")
@torch.inference_mode()
def test_logits_equal_those_of_plain_forwards(tmp_path: Path) -> None:
    make_model("qwen3").save_pretrained(tmp_path)
    config = load_config(tmp_path, "float32")
    model = load_decoder(tmp_path, config)
    group = LayerGroup(tuple(range(config.num_layers)), config.num_kv_heads, config.head_dim)
    layout = KVLayout((group,), 8, torch.float32)
    caches = []
    for _ in range(2):
        pool = torch.full((40, *layout.page_shape(0)), torch.nan)
        cache = PagedKVCache(
            layout, (pool,), max_sequences=4, max_sequence_length=64, rope=config.rope, writer=None, kernels=StepKernels
        )
        for sequence, length in enumerate(LENGTHS):
            cache.add_sequence(sequence)
            plan = cache.begin_forward([sequence], [length])
            model.forward(torch.arange(length) + sequence, PlannedAttention(cache, plan), torch.tensor([0]))
        caches.append(cache)
    fixed, plain = caches
    (batch,) = fixed.fixed_batches([3], config.num_heads, num_inputs=1)
    for sequences in ([0, 1], [1]):
        tokens = 3 + np.array(sequences)
        plan = plain.begin_forward(sequences, [1] * len(sequences))
        expected = model.forward(torch.from_numpy(tokens), PlannedAttention(plain, plan), None)
        fixed.begin_fixed(batch, sequences, [tokens])
        actual = model.forward(batch.inputs[0], batch.attention(), None)
        torch.testing.assert_close(actual[: len(sequences)], expected, rtol=1e-4, atol=1e-4)
