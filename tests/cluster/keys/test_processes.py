"""A keys file in the gateway processes of one host."""

import time
from dataclasses import replace
from pathlib import Path

from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.gateway.gateway import Gateway
from tandem.cluster.peers.table import GatewayFile
from tandem.workers.event_loop import EventLoopThread
from tests.cluster.scripted_model import make_scripted
from tests.support.gateways import settings_of
from tests.support.http_client import get

TOKEN = "an-operators-token"


def test_a_bad_file_counts_once_a_host(tmp_path: Path) -> None:
    file, model = tmp_path / "keys.yaml", make_scripted(tmp_path / "model")
    file.write_text("keys: []")
    options = {"security.keys_file": str(file), "security.api_key": TOKEN, "gateway.port": 0, "gateway.http_port": 0}
    settings = settings_of(load_config(None, {**options, "model.path": str(model)}), 256, 64)
    memory, events = GatewayFile(2, settings.num_islands), EventLoopThread("gateways")
    shared = replace(settings, processes=2, table=memory.path, peer_token="a token of all")
    gateways = [Gateway(replace(shared, process=process)) for process in range(2)]
    try:
        addresses = [events.run(gateway.start(), timeout=10).http for gateway in gateways]
        file.write_text("keys: [{name: a}]")
        said = ""
        limit = time.monotonic() + 10
        for address in addresses:
            assert address is not None
            while "tandem:keys_file_stale 1.0" not in (said := metrics(address)):
                assert time.monotonic() < limit
                time.sleep(0.25)
        found = [line for line in said.splitlines() if line.startswith("tandem:keys_file_errors_total")]
        assert [line.rpartition(" ")[2] for line in found] == ["1.0"]
    finally:
        for gateway in gateways:
            events.run(gateway.stop(0.1), timeout=30)
        events.stop()
        memory.close()


def metrics(address: str) -> str:
    return get(address, "/metrics", headers={"authorization": f"Bearer {TOKEN}"}).text
