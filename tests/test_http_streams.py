"""The benchmarks' client of the HTTP door, against a gateway whose worker answers as told."""

import asyncio
from pathlib import Path

import pytest

from tests.benchmarks.http_streams import HttpStreams
from tests.cluster.doors import PROMPT, TOKENS, door
from tests.support.checkpoints import save_checkpoint


def test_each_token_arrives_once(tmp_path: Path) -> None:
    async def ask(address: str) -> list[int]:
        async with HttpStreams(address) as streams:
            async with asyncio.TaskGroup() as group:
                first = [group.create_task(streams.arrivals(PROMPT, count, 20)) for count in (1, 2, len(TOKENS))]
            later = await streams.arrivals(PROMPT, len(TOKENS), 20)  # on a connection that has served
            assert later == sorted(later)
            with pytest.raises(ValueError, match="400 Bad Request"):
                await streams.arrivals([], 1, 20)
            return [*(len(each.result()) for each in first), len(later)]

    with door(save_checkpoint("llama", tmp_path)) as opened:
        assert asyncio.run(ask(opened.http)) == [1, 2, len(TOKENS), len(TOKENS)]


def test_a_stream_that_ends_with_an_error(tmp_path: Path) -> None:
    async def ask(address: str) -> None:
        async with HttpStreams(address) as streams:
            with pytest.raises(ValueError, match="INVALID_ARGUMENT"):
                await streams.arrivals(PROMPT, len(TOKENS), 20)

    with door(save_checkpoint("llama", tmp_path), fails={"StartGenerate": ["go on", "INVALID_ARGUMENT"]}) as opened:
        asyncio.run(ask(opened.http))
