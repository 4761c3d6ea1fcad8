"""A key at the gateways of two hosts."""

import json
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.gateway.gateway import Gateway
from tandem.cluster.keys.key import digest_of
from tandem.cluster.keys.key_cells import Unit
from tandem.cluster.peers.hosts import GatewayHost, GatewayHosts
from tandem.cluster.supervision.authority import Authority
from tandem.workers.event_loop import EventLoopThread
from tests.cluster.fake_worker import FakeWorker
from tests.cluster.scripted_model import make_scripted
from tests.support.gateways import settings_of
from tests.support.http_client import post

KEY, LIMIT = "tdm-of-both", 8
BODY = {"prompt": [5, 6, 7], "max_tokens": 2}


def used(gateway: Gateway) -> int:
    book = gateway._callers.book
    assert book is not None
    return book._cells.used(book.all()[0].id, int(time.monotonic()))[Unit.REQUESTS]


def test_gateways_of_two_hosts_hold_a_limit_together(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    entry = {"name": "both", "sha256": digest_of(KEY).hex(), "requests_per_minute": LIMIT}
    file.write_text(json.dumps({"keys": [entry]}))
    model = make_scripted(tmp_path / "model")
    options = {"security.keys_file": str(file), "security.api_key": "an-operators-token", "gateway.port": 0}
    config = load_config(None, {**options, "model.path": str(model), "gateway.http_port": 0})
    one = replace(settings_of(config, 256, 64), peers=Authority("c gateways").peer(), peer_token="a token of all")
    events, worker = EventLoopThread("gateways"), FakeWorker(lambda sequence: len(sequence), {})
    events.run(worker.start(), timeout=10)
    gateways = [Gateway(replace(one, number=number)) for number in (1, 2)]
    try:
        started = [events.run(gateway.start(), timeout=10) for gateway in gateways]
        hosts = tuple(GatewayHost(1 + at, "there", (found.peer,)) for at, found in enumerate(started))
        for gateway in gateways:
            events.run(gateway.update_hosts(GatewayHosts(1, hosts)), timeout=10)
            events.run(gateway.update_island(worker.state("i", epoch=1, version=1)), timeout=10)

        def ask(number: int) -> int:
            address = started[number % 2].http
            assert address is not None
            return post(address, "/v1/completions", BODY, headers={"authorization": f"Bearer {KEY}"}).status_code

        first = [ask(number) for number in range(4)]
        limit = time.monotonic() + 20
        while [used(gateway) for gateway in gateways] != [4, 4]:  # until they have heard of each other
            assert time.monotonic() < limit
            time.sleep(0.05)
        with ThreadPoolExecutor(4) as pool:
            found = Counter([*first, *pool.map(ask, range(3 * LIMIT))])
        assert LIMIT <= found[200] <= LIMIT + 1
        assert found[200] + found[429] == 4 + 3 * LIMIT
    finally:
        for gateway in gateways:
            events.run(gateway.stop(0.1), timeout=30)
        events.run(worker.stop(), timeout=10)
        events.stop()
