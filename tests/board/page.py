"""Pictures of the status page, of a small cluster without load, under load, and with a dead island.

`python -m tests.board.page FOLDER` takes a minute. It needs Chromium.
"""

import argparse
import os
import random
import signal
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

from PIL import Image

from tandem.cluster.client import Client
from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.errors import CallError
from tandem.cluster.supervision.launcher import Cluster
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tests.support.browser import Tab, open_tab
from tests.support.local_processes import LocalProcesses

CLIENTS = 8
LOAD_SECONDS = 40.0
WIDTH = 1100
OPTIONS = {
    "num_islands": 2,
    "island.threads_per_worker": 1,
    "gateway.port": 0,
    "gateway.http_port": 0,
    "scheduler.max_sequences": 4,
    "cache.num_pages": 128,
    "cache.host_bytes": 64 << 20,
    "recovery.drain_seconds": 1.0,
    "recovery.max_restarts": 1000,
}


def send(address: str, number: int, ends: float) -> None:
    """One client, with prompts of a shared beginning."""
    draw = random.Random(number)
    shared = [draw.randrange(512) for _ in range(64)]
    with Client(address) as client:
        while time.monotonic() < ends:
            prompt = shared + [draw.randrange(512) for _ in range(draw.randrange(16, 512))]
            try:
                for _ in client.generate(prompt, max_tokens=draw.randrange(20, 120), temperature=0, ignore_eos=True):
                    pass
            except CallError as error:
                print(f"client {number}: {error}"[:120])


def lose(client: Client) -> None:
    """Ends a worker of the first island, if it has one."""
    for worker in client.cluster_info().islands[0].workers[:1]:
        with suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGKILL)


def take(tab: Tab, file: Path) -> None:
    tab.picture(file)
    Image.open(file).convert("RGB").quantize(64, kmeans=1).save(file, optimize=True)


def pictures(address: str, grpc: str, folder: Path) -> None:
    with open_tab() as tab, Client(grpc) as client:
        tab.resize(WIDTH, 1000)
        tab.open(f"http://{address}/")
        tab.until("#islands", "serves")
        time.sleep(5)
        take(tab, folder / "idle.png")
        ends = time.monotonic() + LOAD_SECONDS
        clients = [threading.Thread(target=send, args=(grpc, number, ends)) for number in range(CLIENTS)]
        for one in clients:
            one.start()
        time.sleep(LOAD_SECONDS * 0.6)
        take(tab, folder / "load.png")
        while "starting again" not in tab.text("#islands"):  # here it is back within a second
            lose(client)
            time.sleep(0.1)
        tab.colors("dark")
        take(tab, folder / "dead.png")
        for one in clients:
            one.join()
        assert tab.complaints == []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    given.folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        make_checkpoint(model, arch="llama", size="small", seed=3)
        cluster = Cluster(load_config(None, {"model.path": str(model), **OPTIONS}), LocalProcesses())
        grpc = cluster.start()
        try:
            pictures(cluster.http_address or "", grpc, given.folder)
        finally:
            cluster.stop()


if __name__ == "__main__":
    main()
