"""Pages of a worker's pools."""

from pathlib import Path

import pytest

from tandem.workers.config import Role, WorkerConfig
from tandem.workers.models.registry import load_config
from tandem.workers.pool_pages import pages_in, pool_pages, snapshot_rule
from tandem.workers.runner.model_cache import kv_layout
from tests.workers.models.test_nemotron_config import DENSE, write


@pytest.mark.parametrize(
    ("num_pages", "share", "interval", "sequences", "most"),
    [
        (1024, 0.25, 512, 256, 17),  # the defaults: 264 sequences
        (1024, 0.25, 512, 8, 1),
        (20, 0.25, 512, 256, 2),  # of 20 sequences, which have a page each
        (1581 * 17, 0.25, 512, 256, 17),
        (1581 * 18, 0.25, 512, 256, 18),
        (1581, 0.5, 512, 8, 2),
        (1024, 0.0, 512, 256, 0),
        (1024, 0.25, None, 256, 0),
    ],
)
def test_however_few_pages_there_are_some_are_for_snapshots(
    tmp_path: Path, num_pages: int, share: float, interval: int | None, sequences: int, most: int
) -> None:
    """Of Nemotron-H-8B, where one takes as much as K and V of 395.2 pages."""
    layout = kv_layout(load_config(write(tmp_path, {**DENSE, "torch_dtype": "bfloat16"})), 16)
    where = (Role.DECODE, "island", 1, 0, 1, "", 1024, "")
    config = WorkerConfig(*where, state_share=share, state_interval=interval, max_sequences=sequences)
    assert snapshot_rule(config, layout, num_pages).most == most
    pages = pool_pages(config, layout, num_pages)
    assert pages == (num_pages, min(num_pages, sequences + 8) + most)
    num_bytes = sum(count * layout.page_bytes(group) for group, count in enumerate(pages))
    assert pages_in(config, layout, num_bytes) == num_pages
