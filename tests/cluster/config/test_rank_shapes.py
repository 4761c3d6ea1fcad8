"""Ranks that cannot divide a model are refused with the numbers that can."""

from dataclasses import replace
from pathlib import Path

import pytest

from tandem.cache.kernels.recurrent import DeltaShape
from tandem.cluster.cli.rank_room import gpu_shapes
from tandem.cluster.config.island import IslandSection
from tandem.cluster.config.rank_shapes import check_ranks
from tandem.cluster.errors import ConfigError
from tandem.workers.models.recurrent.fields import DeltaNetConfig
from tandem.workers.models.registry import load_config

DEMO = Path(__file__).resolve().parents[3] / "cluster/tools/demo_model/checkpoint"


def test_what_fits_is_said() -> None:
    model = load_config(DEMO)
    check_ranks(IslandSection(prefill_ranks=2, decode_ranks=1), (model, None))
    with pytest.raises(ConfigError) as refused:
        check_ranks(IslandSection(prefill_ranks=2, decode_ranks=4), (model, None))
    assert str(refused.value) == (
        "island.decode_ranks is 4: num_heads is 6; it must be a multiple of the 4 ranks that divide it; 1, 2 fit this "
        "model"
    )


def test_recurrent_heads_count_too() -> None:
    """Four ranks could share two key heads, but not divide the 6 value heads."""
    shape = DeltaShape(key_heads=2, value_heads=6, key_dim=8, value_dim=8, tail=3)
    recurrent = DeltaNetConfig(frozenset((0,)), shape, "linear_attn", by_key_head=False)
    model = replace(load_config(DEMO), num_heads=12, recurrent=recurrent)
    check_ranks(IslandSection(prefill_ranks=2, decode_ranks=1), (model, None))
    with pytest.raises(ConfigError) as refused:
        check_ranks(IslandSection(prefill_ranks=4), (model, None))
    assert str(refused.value) == (
        "island.prefill_ranks is 4: value_heads of recurrent layers is 6; it must be a multiple of the 4 ranks that "
        "divide it; 1, 2 fit this model"
    )


def test_shapes_that_a_hosts_gpus_serve_have_a_worker_of_several_ranks() -> None:
    assert [gpu_shapes(gpus) for gpus in (0, 2, 3, 4)] == [[], [], ["1 + 2", "2 + 1"], ["1 + 2", "2 + 1", "2 + 2"]]
    assert gpu_shapes(9)[-1] == "8 + 1"


def test_every_transport_serves_workers_of_several_ranks() -> None:
    for device, transport in (("cpu", "nixl"), ("cpu", "tcp"), ("cuda", "nixl"), ("cuda", "nvshmem")):
        section = {"device": device, "transport": transport, "decode_ranks": 2}
        assert IslandSection.model_validate(section).decode_ranks == 2
