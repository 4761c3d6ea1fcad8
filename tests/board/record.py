"""Scrapes of a small cluster under load that comes and goes, with a lost worker in the middle: what the picture of the
Grafana board is made from (tests/board/draw.py). `python -m tests.board.record FILE` takes about two minutes.
"""

import argparse
import json
import os
import random
import signal
import tempfile
import threading
import time
from io import StringIO
from pathlib import Path

from rich.console import Console

from tandem.cluster.cli.top import look, render
from tandem.cluster.client import Client
from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.errors import CallError
from tandem.cluster.supervision.launcher import Cluster
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tandem.proto import inference_pb2
from tests.support.local_processes import LocalProcesses

SECONDS = 100
FULL_SECOND = 45
LOSS_SECOND = 60
WIDTH = 150
PERIOD = 1.0
CLIENTS = (1, 2, 4, 6, 8, 6, 3, 2, 5, 1)  # in each tenth of the time
OPTIONS = {
    "island.num_prefill": 2,
    "island.num_decode": 2,
    "island.threads_per_worker": 1,
    "gateway.processes": 2,
    "gateway.port": 0,
    "scheduler.max_sequences": 4,
    "cache.num_pages": 128,
}


def send(address: str, number: int, begun: float) -> None:
    """One client, which sends while the time asks for so many."""
    draw = random.Random(number)
    shared = [draw.randrange(512) for _ in range(64)]
    with Client(address) as client:
        while (now := time.monotonic() - begun) < SECONDS:
            if number >= CLIENTS[int(now / SECONDS * len(CLIENTS))]:
                time.sleep(0.1)
                continue
            length = draw.randrange(20, 120) if draw.random() < 0.97 else 1 << 20  # which no model takes
            prompt = shared + [draw.randrange(512) for _ in range(draw.randrange(16, 128))]
            try:
                for _ in client.generate(prompt, max_tokens=length, temperature=0, ignore_eos=True):
                    pass
            except CallError as error:
                print(f"client {number}: {error}"[:120])


def lose(client: Client) -> None:
    """Ends a decode worker."""
    workers = [worker for island in client.cluster_info().islands for worker in island.workers]
    os.kill(next(one.pid for one in workers if one.role == inference_pb2.ROLE_DECODE), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--top", type=Path, help="where to keep a picture of `tandem top` at full load, SVG")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        make_checkpoint(model, arch="llama", size="small", seed=3)
        cluster = Cluster(load_config(None, {"model.path": str(model), **OPTIONS}), LocalProcesses())
        address = cluster.start()
        try:
            record(address, given.file, given.top)
        finally:
            cluster.stop()


def picture(client: Client, file: Path) -> None:
    """One view of `tandem top`."""
    console = Console(record=True, width=WIDTH, force_terminal=True, highlight=False, file=StringIO())
    console.print(render(next(look(client, PERIOD, patient=False))))
    console.save_svg(str(file), title="tandem top")


def record(address: str, file: Path, top: Path | None) -> None:
    begun, lost, scrapes = time.monotonic(), False, []
    clients = [threading.Thread(target=send, args=(address, number, begun)) for number in range(max(CLIENTS))]
    for client in clients:
        client.start()
    with Client(address) as client:
        while (now := time.monotonic() - begun) < SECONDS:
            try:
                if top is not None and now >= FULL_SECOND:
                    picture(client, top)
                    top = None
                scrapes.append({"at": now, "text": client.metrics().text})
                if not lost and now >= LOSS_SECOND:
                    lost = True
                    lose(client)
            except CallError as error:
                print(f"scrape: {error}")
            time.sleep(PERIOD)
    for one in clients:
        one.join()
    file.write_text("\n".join(map(json.dumps, scrapes)) + "\n")


if __name__ == "__main__":
    main()
