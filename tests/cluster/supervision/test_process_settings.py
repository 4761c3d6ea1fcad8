import pytest

from tandem.cluster.config.cluster_config import ClusterConfig, load_config
from tandem.cluster.errors import ConfigError
from tandem.cluster.supervision import process_settings
from tandem.cluster.supervision.process_settings import (
    agreed_pages,
    gateway_processes,
    utilization_to_fill,
    worker_configs,
)

GPU = {"island.device": "cuda", "island.transport": "nvshmem"}


def test_on_a_cpu_the_configuration_says_how_many_pages() -> None:
    for config, pages in ((ClusterConfig(), 1024), (load_config(None, {"cache.num_pages": 7}), 7)):
        assert utilization_to_fill(config) is None
        assert agreed_pages(config, (), max_model_len=100_000) == pages


def test_on_a_gpu_num_pages_takes_the_place_of_a_utilization() -> None:
    config = load_config(None, GPU | {"cache.num_pages": 7})
    assert utilization_to_fill(config) is None
    assert agreed_pages(config, (), max_model_len=100_000) == 7


@pytest.mark.parametrize(
    ("settings", "sequences", "signals"),
    [
        ({}, 256, 256),
        (GPU, 512, 512),
        (GPU | {"scheduler.max_sequences": 40}, 40, 40),
        ({"island.num_signals": 7}, 256, 7),
    ],
)
def test_a_worker_awaits_as_many_requests_as_it_runs(settings: dict[str, object], sequences: int, signals: int) -> None:
    for worker in worker_configs(load_config(None, settings), max_model_len=100):
        assert (worker.max_sequences, worker.num_signals) == (sequences, signals)


@pytest.mark.parametrize(
    ("cores", "processes"), [(None, 1), (1, 1), (2, 1), (4, 1), (7, 1), (8, 2), (12, 3), (16, 4), (128, 4)]
)
def test_a_larger_machine_has_more_gateway_processes(
    cores: int | None, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_settings.os, "cpu_count", lambda: cores)
    assert gateway_processes(ClusterConfig()) == processes
    assert gateway_processes(load_config(None, {"gateway.processes": 3})) == 3


@pytest.mark.parametrize(("given", "filled"), [(None, 0.9), (0.5, 0.5)])
def test_on_a_gpu_every_pool_has_what_the_fullest_gpu_has_room_for(given: float | None, filled: float) -> None:
    config = load_config(None, GPU | {"cache.gpu_memory_utilization": given})
    assert utilization_to_fill(config) == filled
    assert agreed_pages(config, (500, 300, 400), max_model_len=4800) == 300


def test_a_pool_must_hold_the_longest_request() -> None:
    config = load_config(None, GPU | {"cache.gpu_memory_utilization": 0.5})
    with pytest.raises(ConfigError) as caught:
        agreed_pages(config, (300, 400), max_model_len=4801)
    for part in ("cache.gpu_memory_utilization 0.5", "300 pages", "4801", "model.max_model_len to at most 4800"):
        assert part in str(caught.value)
