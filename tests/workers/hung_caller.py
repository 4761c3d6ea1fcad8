"""A process that calls a decode worker and then does nothing more: `python -m tests.workers.hung_caller ADDRESS TOKEN`.

Prints `waiting` when its StartGenerate is under way.
"""

import sys
import threading

import grpc

from tandem.proto import inference_pb2, worker_pb2, worker_pb2_grpc
from tandem.workers.ports.authentication import authorized
from tests.support.prompt_specs import prompt_message


def main(address: str, token: str) -> None:
    sampling = inference_pb2.SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, seed=1)
    with grpc.insecure_channel(address) as channel:
        stub = authorized(worker_pb2_grpc.WorkerStub(channel), token)
        prepare = worker_pb2.PrepareReceiveRequest(
            request_id="r", epoch=1, prompt=prompt_message([5] * 20), max_tokens=4
        )
        reservation = stub.PrepareReceive(prepare, timeout=30)
        start = worker_pb2.StartGenerateRequest(
            request_id="r", epoch=1, reservation_id=reservation.reservation_id, sampling=sampling
        )
        stream = stub.StartGenerate(start, timeout=120)
        threading.Thread(target=lambda: list(stream), daemon=True).start()
        print("waiting", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
