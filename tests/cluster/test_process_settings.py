import pytest

from tandem.cluster.config import ClusterConfig, load_config
from tandem.cluster.errors import ConfigError
from tandem.cluster.process_settings import agreed_pages, utilization_to_fill
from tandem.workers.gpu_room import GpuRoom

GPU = {"island.device": "cuda", "island.transport": "nvshmem"}


def rooms(*pages: int) -> list[GpuRoom]:
    return [GpuRoom(f"GPU-{index}", count) for index, count in enumerate(pages)]


def test_on_a_cpu_the_configuration_says_how_many_pages() -> None:
    for config, pages in ((ClusterConfig(), 1024), (load_config(None, {"cache.num_pages": 7}), 7)):
        assert utilization_to_fill(config) is None
        assert agreed_pages(config, (), max_model_len=100_000) == pages


def test_on_a_gpu_num_pages_takes_the_place_of_a_utilization() -> None:
    config = load_config(None, GPU | {"cache.num_pages": 7})
    assert utilization_to_fill(config) is None
    assert agreed_pages(config, (), max_model_len=100_000) == 7


@pytest.mark.parametrize(("given", "filled"), [(None, 0.9), (0.5, 0.5)])
def test_on_a_gpu_every_pool_has_what_the_fullest_gpu_has_room_for(given: float | None, filled: float) -> None:
    config = load_config(None, GPU | {"cache.gpu_memory_utilization": given})
    assert utilization_to_fill(config) == filled
    assert agreed_pages(config, rooms(500, 300, 400), max_model_len=4800) == 300


def test_a_pool_must_hold_the_longest_request() -> None:
    config = load_config(None, GPU | {"cache.gpu_memory_utilization": 0.5})
    with pytest.raises(ConfigError) as caught:
        agreed_pages(config, rooms(300, 400), max_model_len=4801)
    for part in ("cache.gpu_memory_utilization 0.5", "300 pages", "4801", "model.max_model_len to at most 4800"):
        assert part in str(caught.value)


def test_workers_that_share_a_gpu_must_be_told_how_many_pages() -> None:
    """Each has counted what is free for itself."""
    config = load_config(None, GPU)
    with pytest.raises(ConfigError, match=r"cache\.num_pages is null, and 2 workers share the GPU GPU-1: .* give"):
        agreed_pages(config, [*rooms(300, 400), GpuRoom("GPU-1", 400)], max_model_len=100)
