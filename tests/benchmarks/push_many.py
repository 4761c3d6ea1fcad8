"""Pushes of several PEs at once: Qwen3-8B's KV between four GPUs of one host, through NVSHMEM. Prints JSON.

As in push.py, pages of 2.25 MiB in random order, 8K tokens a push; each sender has one push after another on its way to
each of its receivers, all of them at once. GB/s of a sender: bytes ÷ seconds from the common start to its last quiet().
÷ alone: by the rate of one pair that has the host for itself, in the same run.
"""

import argparse
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tandem.cache.plan.arrays import Int32Array
from tandem.transfer.membership import TransportConfig
from tandem.transfer.transport import Transport
from tests.benchmarks.options import add_list, benchmark_parser
from tests.benchmarks.pes import run_pes
from tests.benchmarks.push import LAYOUT, NUM_PAGES, PAGE, page_sums, slots_of
from tests.benchmarks.results import plot, print_result, print_skipped, rounded

NUM_PES = 4
SHARE = NUM_PAGES // NUM_PES  # of a pool: one sender's pages
TOKENS = 8192
ALONE = "one pair"
# Sender and receivers.
PATTERNS: dict[str, dict[int, tuple[int, ...]]] = {
    ALONE: {0: (1,)},
    "two pairs": {0: (1,), 2: (3,)},
    "both ways": {0: (1,), 1: (0,)},
    "ring of four": {pe: ((pe + 1) % NUM_PES,) for pe in range(NUM_PES)},
    "one to three": {0: (1, 2, 3)},
    "three to one": {1: (0,), 2: (0,), 3: (0,)},
    "two to two": {0: (2, 3), 1: (2, 3)},
}


def random_pages(pe: int, number: int) -> tuple[Int32Array, Int32Array]:
    """PE pe's push `number`: from which of its pages, into which of each receiver's; all are of its share."""
    rng = np.random.default_rng((pe, number))
    first, second = (pe * SHARE + rng.permutation(SHARE)[: TOKENS // PAGE].astype(np.int32) for _ in range(2))
    return first, second


def rate(transport: Transport, receivers: tuple[int, ...], pushes: int) -> float:
    """GB/s of `pushes` to each receiver, from now."""
    tables = [tuple(map(slots_of, random_pages(transport.pe, number))) for number in range(pushes)]
    torch.cuda.synchronize()
    dist.barrier()
    began = time.perf_counter()
    for sources, targets in tables:
        for receiver in receivers:
            transport.write_slots(receiver, 0, sources, targets)
    for receiver in receivers:
        transport.quiet(receiver)
    seconds = time.perf_counter() - began
    return pushes * len(receivers) * TOKENS * LAYOUT.token_bytes / seconds / 1e9


def check_landed(pool: Tensor, pe: int, senders: dict[int, tuple[int, ...]], pushes: int) -> None:
    """Checks that what each sender pushed last stands with each of its receivers."""
    mine: dict[int, list[int]] = {}
    for sender, receivers in senders.items():
        if pe in (sender, *receivers):
            sources, targets = random_pages(sender, pushes - 1)
            mine[sender] = page_sums(pool, sources if pe == sender else targets)
    sums: list[Any] = [None] * NUM_PES
    dist.all_gather_object(sums, mine)
    for sender, receivers in senders.items():
        if any(sums[receiver][sender] != sums[sender][sender] for receiver in receivers):
            raise SystemExit(f"pages of PE {sender} did not land as sent with PEs {receivers}")


def measure(transport: Transport, senders: dict[int, tuple[int, ...]], pushes: int) -> dict[int, float]:
    """GB/s of each sender, on every PE. One push before the others warms up."""
    pe, pool = transport.pe, transport.pools[0]
    rates: list[float] = []
    for count in (1, pushes):
        pool.normal_(generator=torch.Generator("cuda").manual_seed(pe))
        torch.cuda.synchronize()
        dist.barrier()
        rates = [0.0] * NUM_PES
        if pe in senders:
            mine = rate(transport, senders[pe], count)
        else:
            dist.barrier()
            mine = 0.0
        dist.all_gather_object(rates, mine)
        check_landed(pool, pe, senders, count)
    return {sender: rounded(rates[sender]) for sender in senders}


def result_of(rates: dict[str, dict[int, float]]) -> dict[str, Any]:
    alone = sum(rates[ALONE].values())
    patterns = {
        name: {
            "gb_s": list(of.values()),
            "sum_gb_s": rounded(sum(of.values())),
            "slowest_to_alone": rounded(min(of.values()) / alone),
            "sum_to_alone": rounded(sum(of.values()) / alone),
        }
        for name, of in rates.items()
    }
    sums = [numbers["sum_gb_s"] for numbers in patterns.values()]
    return {"patterns": patterns, "plots": [plot("all senders", "", "GB/s", list(patterns), {"GB/s": sums})]}


def run(pe: int, folder: str, options: argparse.Namespace) -> None:
    from tandem.transfer.nvshmem.transport import NvshmemTransport  # needs a GPU's packages

    torch.cuda.set_device(pe)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=pe, world_size=NUM_PES)
    transport = NvshmemTransport(TransportConfig(pe, NUM_PES, LAYOUT, (NUM_PAGES,), 8, "bench-push-many", 1))
    handles: list[Any] = [None] * NUM_PES
    dist.all_gather_object(handles, transport.open())
    transport.join(handles)
    rates = {name: measure(transport, PATTERNS[name], options.pushes) for name in patterns_of(options)}
    if pe == 0:
        print_result(result_of(rates), options, gpus=NUM_PES)
    transport.close()
    dist.destroy_process_group()


def patterns_of(options: argparse.Namespace) -> list[str]:
    """The pair alone, which the others are compared to, first."""
    return [ALONE, *(name for name in options.patterns if name != ALONE)]


def main() -> None:
    parser = benchmark_parser(__file__, __doc__)
    add_list(parser, "--patterns", default=list(PATTERNS), choices=list(PATTERNS))
    parser.add_argument("--pushes", type=int, default=20, help="to each receiver")
    options = parser.parse_args()
    if torch.cuda.device_count() < NUM_PES:
        print_skipped(f"needs {NUM_PES} CUDA devices of one host")
        return
    run_pes(run, NUM_PES, options)


if __name__ == "__main__":
    main()
