import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.cache.plan.latent import UpProjections
from tandem.workers.errors import GpuTooSmall
from tandem.workers.models.registry import load_config
from tandem.workers.models.weights import load_decoder
from tandem.workers.runner.memory_budget import MemoryBudget, on_the_gpu, run_largest_forward
from tandem.workers.runner.model_cache import kv_layout, make_cache
from tandem.workers.runner.reserved_bytes import RESERVED_BYTES
from tests.support.checkpoints import save_checkpoint
from tests.support.tvm_cache import TvmCache

GIB = 1 << 30


@given(
    total=st.integers(1, 300 * GIB),
    used=st.integers(0, 300 * GIB),
    utilization=st.floats(0.01, 1),
    page_bytes=st.integers(1, GIB),
)
def test_the_room_is_what_the_budget_leaves(total: int, used: int, utilization: float, page_bytes: int) -> None:
    budget = MemoryBudget(total, used, utilization)
    try:
        room = budget.room(page_bytes)
    except GpuTooSmall:
        assert used + RESERVED_BYTES + page_bytes > int(total * utilization)
    else:
        assert room >= page_bytes
        assert used + RESERVED_BYTES + room == int(total * utilization)


def test_weights_that_leave_no_room_say_what_would() -> None:
    with pytest.raises(
        GpuTooSmall, match=r"cache\.gpu_memory_utilization is 0\.1, of 100\.0 GiB: .* 20\.0 GiB"
    ) as caught:
        MemoryBudget(100 * GIB, 20 * GIB, 0.1).room(2 << 20)
    least = float(str(caught.value).rpartition("at least ")[2])
    assert MemoryBudget(100 * GIB, 20 * GIB, least + 0.001).room(2 << 20) >= 2 << 20
    with pytest.raises(GpuTooSmall, match="no value suffices"):
        MemoryBudget(24 * GIB, 23 * GIB, 0.9).room(2 << 20)


@pytest.mark.parametrize("family", ["qwen3", "llama4", "qwen3_next"])
def test_the_largest_forward_has_logits_for_every_sequence(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_checkpoint(family, tmp_path)
    model = load_decoder(folder, load_config(folder))
    seen: list[torch.Size] = []
    forward = model.forward

    def watched(*arguments: torch.Tensor) -> torch.Tensor:
        logits = forward(*arguments)  # type: ignore[arg-type]
        seen.append(logits.shape)
        return logits

    monkeypatch.setattr(model, "forward", watched)
    run_largest_forward(model, 40, 8, 64)
    assert seen == [(8, model.config.vocab_size)]


def test_the_largest_forward_runs_beside_what_a_head_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_checkpoint("llama", tmp_path)
    model, left = load_decoder(folder, load_config(folder)), list[weakref.ref[torch.Tensor]]()
    forward, there = model.forward, list[bool]()

    def begin(token_ids: torch.Tensor, *rest: object) -> tuple[torch.Tensor, Callable[[torch.Tensor], None]]:
        features = torch.empty(token_ids.shape[0], model.config.hidden_size)
        left.append(weakref.ref(features))
        return features, lambda _: features.zero_()  # type: ignore[return-value]

    def watched(*arguments: torch.Tensor) -> torch.Tensor:
        there.append(left[0]() is not None)
        return forward(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(model, "begin_prompts", begin)
    monkeypatch.setattr(model, "forward", watched)
    run_largest_forward(model, 40, 8, 64)
    assert there == [True]


def test_the_largest_forward_makes_as_many_keys_and_values_of_latents_as_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_checkpoint("deepseek_v2", tmp_path)
    model = load_decoder(folder, load_config(folder))
    made, keys_and_values = list[int](), UpProjections.keys_and_values

    def watched(up: UpProjections, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = keys_and_values(up, entries)
        made.append(keys.numel() + values.numel())
        return keys, values

    monkeypatch.setattr(UpProjections, "keys_and_values", watched)
    layout, latent = kv_layout(model.config, 16), model.config.latent
    assert latent is not None
    pools = [torch.zeros(8, *layout.page_shape(group)) for group in range(len(layout.groups))]
    cache = TvmCache.of(make_cache(model.config, layout, pools, max_sequences=1, max_length=80))
    cache.add_sequence(0)
    with torch.inference_mode():
        for _ in range(2):
            plan = cache.begin_forward([0], [40])
            model.forward(torch.zeros(40, dtype=torch.int64), plan.attention, torch.tensor([39]))
            cache.end_forward(plan)
    largest = max(made)
    made.clear()
    run_largest_forward(model, 40, 1, 80)
    assert max(made) == largest
    made.clear()
    monkeypatch.setattr("tandem.workers.runner.memory_budget.EXPANDED_POSITIONS", 100)
    monkeypatch.setattr("tandem.cache.plan.latent.EXPANDED_ROWS", 200)
    run_largest_forward(model, 40, 1, 1 << 40)
    assert set(made) == {200 * (latent.query_dim + latent.heads.value_dim)}


def test_a_gpu_that_fills_while_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 9 << 30)
    with pytest.raises(GpuTooSmall) as caught, on_the_gpu("the weights"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert str(caught.value) == (
        "the GPU has no room for the weights: of 80.0 GiB this worker has 9.0 GiB, other processes have 70.0 GiB, and "
        "1.0 GiB are free; `nvidia-smi` names the processes"
    )
