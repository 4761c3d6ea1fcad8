"""JSON in blocks, against the encoder that writes all of it at once."""

import asyncio
import json
from collections.abc import Callable, MutableMapping
from typing import Any

import numpy as np
import pytest

from tandem.cluster.frontends.http.json_blocks import BLOCK_BYTES, JsonList, encode, json_blocks
from tandem.cluster.frontends.http.reply import Reply

TEXT = 'a "quoted" \\ \u00e9 \u2028 \U0001f600\n' * 40_000
VALUES: list[tuple[object, Callable[[object], object]]] = [
    ({"id": 1, "a": [], "b": {}, "c": "", "d": None, "e": [1.5, True, [2, {"f": "g"}], "h"]}, lambda value: value),
    (TEXT, lambda value: value),
    ({"text": TEXT, "rest": [TEXT, 7]}, lambda value: value),
    ([{"index": index, "function": {"name": "f", "arguments": "{}"}} for index in range(9000)], lambda value: value),
    ([f"token {index}" for index in range(65_536)], lambda value: value),
    ({"tokens": np.arange(100_000)}, lambda _: {"tokens": list(range(100_000))}),
    (np.zeros(0, np.int64), lambda _: []),
]


@pytest.mark.parametrize(("value", "plain"), VALUES)
def test_blocks_are_the_encoders_json(value: object, plain: Callable[[object], object]) -> None:
    blocks = list(json_blocks(value, b"data: ", b"\n\n"))
    assert b"".join(blocks).decode() == f"data: {encode(plain(value))}\n\n"
    assert max(map(len, blocks)) < 2 * BLOCK_BYTES


def test_a_list_encodes_its_entries_as_they_come() -> None:
    entries = [{"token": f"t{index}", "top_logprobs": [{"logprob": -index / 7}] * 20} for index in range(800)]
    grown, joined, empty = JsonList(), JsonList(), JsonList()
    for begin in range(0, len(entries), 8):
        part = JsonList()
        part.extend(entries[begin : begin + 8])
        grown.extend(entries[begin : begin + 8])
        joined.join(part)
        joined.join(empty)
    for made in (grown, joined):
        blocks = list(json_blocks({"content": made}))
        assert b"".join(blocks).decode() == encode({"content": entries})
        assert max(map(len, blocks)) < 2 * BLOCK_BYTES
    assert b"".join(json_blocks([empty, 1])) == b"[[],1]"
    assert not empty


class Client:
    """Counts what other tasks do between two blocks."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.headers: dict[bytes, bytes] = {}
        self.begun = 0  # rounds until the answer began
        self.rounds: list[int] = []  # until each block came
        self._round = 0

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Takes all at once, as a fast connection does."""
        if message["type"] == "http.response.start":
            self.headers = dict(message["headers"])
            self.begun = self._round
        else:
            self.body += message["body"]
            self.rounds.append(self._round)

    async def count_rounds(self) -> None:
        while True:
            self._round += 1
            await asyncio.sleep(0)


@pytest.mark.parametrize("stream", [False, True])
def test_other_tasks_go_on_between_two_blocks(stream: bool) -> None:
    value = {"text": TEXT, "calls": [{"call": {"index": index}} for index in range(9000)]}

    async def sent() -> Client:
        client = Client()
        counting = asyncio.ensure_future(client.count_rounds())
        reply = Reply(client.send)
        if stream:
            await reply.events(json_blocks(value))
            await reply.end(json_blocks(value))
        else:
            await reply.whole(200, value)
        counting.cancel()
        return client

    client = asyncio.run(sent())
    assert len(client.rounds) > 20
    assert len(set(client.rounds)) >= len(client.rounds) - 1
    assert stream or client.begun >= len(client.rounds) - 1  # all of it is encoded by then, for its length
    assert bytes(client.body).decode() == encode(value) * (2 if stream else 1)
    assert stream or int(client.headers[b"content-length"]) == len(client.body)
    json.loads(encode(value))
