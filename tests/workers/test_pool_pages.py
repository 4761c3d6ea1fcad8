"""Pages of a worker's pools."""

import logging
from pathlib import Path

import pytest

from tandem.workers.config import Role, WorkerConfig
from tandem.workers.models.registry import load_config
from tandem.workers.pool_pages import snapshot_rule
from tandem.workers.runner.model_cache import kv_layout
from tests.workers.models.test_nemotron_config import DENSE, write

MESSAGE = (
    "no prefix is shared: a snapshot of the recurrent states has the bytes of 395.2 pages with K and V, and "
    "cache.state_share is 0.25 of cache.num_pages, 1024; at least 1581 pages, or a larger share, hold one"
)


@pytest.mark.parametrize(
    ("num_pages", "share", "interval", "rank", "most", "warns"),
    [
        (1024, 0.25, 512, 0, 0, True),  # the defaults
        (1580, 0.25, 512, 0, 0, True),
        (1581, 0.25, 512, 0, 1, False),
        (1024, 0.5, 512, 0, 1, False),
        (1024, 0.25, 512, 1, 0, False),
        (1024, 0.0, 512, 0, 0, False),
        (1024, 0.25, None, 0, 0, False),
    ],
)
def test_a_share_without_room_for_a_snapshot_is_told(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    num_pages: int,
    share: float,
    interval: int | None,
    rank: int,
    most: int,
    warns: bool,
) -> None:
    """Of Nemotron-H-8B, which shares no prefix with the defaults."""
    layout = kv_layout(load_config(write(tmp_path, {**DENSE, "torch_dtype": "bfloat16"})), 16)
    where = (Role.DECODE, "island", 1, 0, 1, "", 1024, "")
    config = WorkerConfig(*where, state_share=share, state_interval=interval, rank=rank)
    with caplog.at_level(logging.WARNING):
        assert snapshot_rule(config, layout, num_pages).most == most
    told = [one.getMessage().replace("num_pages, 1580", "num_pages, 1024") for one in caplog.records]
    assert told == [MESSAGE] * warns
