"""A gateway that hangs keeps its connections: workers must not keep pages for it."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc

from tandem.proto import worker_pb2, worker_pb2_grpc
from tandem.workers.ports.authentication import authorized
from tests.support.checkpoints import save_checkpoint
from tests.support.island import running_island

ROOT = Path(__file__).resolve().parents[3]


def test_a_gateway_that_hangs_loses_its_reservations(tmp_path: Path) -> None:
    with running_island(save_checkpoint("llama", tmp_path), {"island.lease_seconds": 0.5}) as island:
        address, token = island.workers[1].address, island.workers[1].config.token
        command = [sys.executable, "-m", "tests.workers.hung_caller", address, token]
        caller = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert caller.stdout is not None
            assert caller.stdout.readline() == "waiting\n"
            with grpc.insecure_channel(address) as channel:
                stub = authorized(worker_pb2_grpc.WorkerStub(channel), token)

                def num_held() -> int:
                    info = stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=10)
                    return info.num_pages - info.free_pages

                for _ in range(5):  # as long as a hung one may have, and it is alive: nothing is taken from it
                    assert num_held() == 3
                    time.sleep(0.5)
                caller.send_signal(signal.SIGSTOP)
                while num_held():
                    time.sleep(0.05)
        finally:
            caller.kill()
            caller.communicate()
