"""Page-to-page push of Qwen3-8B KV between two GPUs through the NVSHMEM transport. Prints JSON.

36 layers, 8 KV heads of 128, bf16, page 16: a page is 2.25 MiB. Page tables are random and new in each round, so that
no two pages are neighbours. GB/s are bytes ÷ seconds from the call to its end on the host, median over the rounds:

    W       one copy of 1 GiB into the peer's memory (the roof)
    push    write_slots + quiet; `issue_us` is how long write_slots alone takes
    nccl    one contiguous send of as many bytes
    nixl    WRITEs of NIXL, where its package is installed, between pages of torch's own: in blocks of a page's layer
            (64 KiB) and of a page, without and with four threads of UCX, the better; `make_us` is how long making the
            request alone takes

With --puts the receiver's pages are not mapped, and kernels of ours issue puts: for PEs that are not peer to peer.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tandem.cache.kinds.kv import KV
from tandem.cache.plan.arrays import Int32Array
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.layout import KVLayout
from tandem.transfer.membership import TransportConfig
from tandem.transfer.transport import Transport
from tests.benchmarks import nixl_writes
from tests.benchmarks.measured import Measured, rounded
from tests.benchmarks.options import Budget, add_list, add_seconds, benchmark_parser
from tests.benchmarks.pes import run_pes
from tests.benchmarks.results import at_least, print_result, print_skipped

PAGE, NUM_PAGES = 16, 4096
LAYOUT = KVLayout((LayerGroup(tuple(range(36)), KV(8, 128)),), PAGE, torch.bfloat16)
TARGETS = {1024: 0.85, 8192: 0.95, 32_768: 0.97}  # of W, where pages are mapped
SENDER, RECEIVER = 0, 1
WARM_UP = 3
NIXL_ROUNDS = 10  # at 64 KiB it takes a fifth of a second for 32K tokens
NIXL_THREADS = (0, 4)
NIXL_BLOCKS = {"layer": 36, "page": 1}  # of a page


def join_island(pe: int, puts: bool) -> Transport:
    from tandem.transfer.nvshmem.transport import NvshmemTransport  # needs a GPU's packages

    config = TransportConfig(pe, 2, LAYOUT, (NUM_PAGES,), 8, "bench-push", 1)
    transport = NvshmemTransport(config, peer_access=not puts)
    transport.join(exchange(transport.open()))
    return transport


def exchange(value: Any) -> list[Any]:
    """Both PEs' values."""
    values: list[Any] = [None, None]
    dist.all_gather_object(values, value)
    return values


def median_seconds(call: Callable[[int], object], rounds: int) -> Measured:
    """Returns the median of the rounds after the warm-up; call gets the number of the round."""
    seconds = []
    for number in range(rounds + WARM_UP):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call(number)
        seconds.append(time.perf_counter() - began)
    return Measured.median(seconds[WARM_UP:])


def slots_of(pages: Int32Array) -> Int32Array:
    return (pages[:, None] * PAGE + np.arange(PAGE, dtype=np.int32)).reshape(-1)


def random_pages(length: int, seed: int) -> tuple[Int32Array, Int32Array]:
    rng = np.random.default_rng(seed)
    source, target = (rng.permutation(NUM_PAGES)[: length // PAGE].astype(np.int32) for _ in range(2))
    return source, target


def roof_seconds(transport: Transport, rounds: int) -> Measured:
    elements = (1 << 30) // 2
    source = transport.pools[0].view(-1)[:elements]
    target = torch.empty_like(source, device=torch.device("cuda", RECEIVER))

    def copy(_: int) -> None:
        target.copy_(source)
        torch.cuda.synchronize()

    return median_seconds(copy, rounds)


def push_seconds(transport: Transport, length: int, rounds: int) -> tuple[Measured, Measured]:
    tables = [tuple(map(slots_of, random_pages(length, seed))) for seed in range(rounds + WARM_UP)]
    issued = []

    def push(number: int) -> None:
        began = time.perf_counter()
        sources, targets = tables[number]
        transport.write_slots(RECEIVER, 0, sources, targets)
        issued.append(time.perf_counter() - began)
        transport.quiet(RECEIVER)

    return median_seconds(push, rounds), Measured.median(issued[WARM_UP:])


def nccl_seconds(pe: int, num_bytes: int, rounds: int) -> Measured:
    buffer = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")

    def send(_: int) -> None:
        dist.send(buffer, RECEIVER) if pe == SENDER else dist.recv(buffer, SENDER)
        torch.cuda.synchronize()

    return median_seconds(send, rounds)


def nixl_numbers(pe: int, lengths: Sequence[int], rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """Per length in tokens and kind of block; the sender's are right."""
    pages = torch.empty(NUM_PAGES, LAYOUT.page_bytes(0), dtype=torch.uint8, device="cuda")
    results: dict[str, dict[str, dict[str, float]]] = {str(length): {} for length in lengths}
    for kind, blocks in NIXL_BLOCKS.items():
        for threads in NIXL_THREADS:
            pages.random_(generator=torch.Generator("cuda").manual_seed(pe))
            torch.cuda.synchronize()
            with nixl_writes.connected(pe, pages, blocks, threads, exchange) as side:
                for length in lengths:
                    seconds, made = nixl_seconds(pe, side, length, rounds)
                    check_landed(pe, pages, length, rounds + WARM_UP - 1)
                    rate = round(length * LAYOUT.token_bytes / seconds / 1e9, 1)
                    if rate > results[str(length)].get(kind, {}).get("gb_s", 0.0):
                        made_us = round(made * 1e6, 1)
                        results[str(length)][kind] = {"gb_s": rate, "make_us": made_us, "threads": threads}
    return results


def nixl_seconds(pe: int, side: nixl_writes.NixlPages, length: int, rounds: int) -> tuple[float, float]:
    """Returns the seconds of a write, and of making its request."""
    tables = [random_pages(length, seed) for seed in range(rounds + WARM_UP)]
    made = []

    def write(number: int) -> None:
        note = b"%08d.%04d" % (length, number)
        if pe == SENDER:
            made.append(side.write(*tables[number], note))
        else:
            side.wait_for(note)

    seconds = median_seconds(write, rounds)
    return seconds, Measured.median(made[WARM_UP:]) if made else 0.0


def check_landed(pe: int, pool: torch.Tensor, length: int, seed: int) -> None:
    """The pages of the last round hold the same bits on both sides."""
    sender, receiver = exchange(page_sums(pool, random_pages(length, seed)[pe]))
    if sender != receiver:
        raise SystemExit(f"{length} tokens: pages did not land as sent")


def page_sums(pool: torch.Tensor, pages: Int32Array) -> list[int]:
    """A checksum of each of the pages, in their order, that heeds the order within a page."""
    words = pool.view(pool.shape[0], -1).view(torch.int64)
    weights = torch.arange(1, words.shape[1] + 1, device=words.device)
    return [int((words[page] * weights).sum()) for page in pages.tolist()]


def push_numbers(transport: Transport, length: int, rounds: int, roof: float) -> dict[str, float | None]:
    """Beside NCCL's; the sender's are right. roof: GB/s, 0 where it is not known."""
    pe, num_bytes = transport.pe, length * LAYOUT.token_bytes
    dist.barrier()
    none = Measured.median([1.0])
    seconds, issue = push_seconds(transport, length, rounds) if pe == SENDER else (none, none)
    dist.barrier()
    check_landed(pe, transport.pools[0], length, rounds + WARM_UP - 1)
    nccl = num_bytes / nccl_seconds(pe, num_bytes, rounds) / 1e9
    push = num_bytes / seconds / 1e9
    return {
        "push_gb_s": rounded(push),
        "nccl_gb_s": rounded(nccl),
        "push_to_W": rounded(push / roof) if roof else None,
        "push_to_nccl": rounded(push / nccl),
        "push_us": seconds.scaled(1e6),
        "issue_us": issue.scaled(1e6),
    }


def measure(transport: Transport, lengths: Sequence[int], rounds: int, budget: Budget) -> dict[str, Any]:
    pe = transport.pe
    transport.pools[0].normal_(generator=torch.Generator("cuda").manual_seed(pe))
    dist.barrier()
    roof = (1 << 30) / roof_seconds(transport, rounds) / 1e9 if pe == SENDER else 0.0
    results: dict[str, Any] = {}
    for length in lengths:
        if any(exchange(bool(results) and budget.is_spent)):  # both, or they would wait for each other
            break
        results[str(length)] = push_numbers(transport, length, rounds, roof)
    found = {"W_gb_s": rounded(roof), "tokens": results, "targets": targets_of(transport, results)}
    if not nixl_writes.is_installed():
        return found | {"nixl": nixl_writes.NOT_INSTALLED}
    if not any(exchange(budget.is_spent)):
        for length, numbers in nixl_numbers(pe, [int(length) for length in results], min(rounds, NIXL_ROUNDS)).items():
            results[length]["nixl"] = numbers
    return found | {"peers": [peer for length, numbers in results.items() for peer in peers_of(length, numbers)]}


def targets_of(transport: Transport, results: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the targets of pushes into mapped pages."""
    if transport.peer_pool(RECEIVER, 0) is None:
        return []
    return [
        at_least(f"push of {length // 1024}K tokens ÷ W", results[str(length)]["push_to_W"] or 0.0, target)
        for length, target in TARGETS.items()
        if str(length) in results
    ]


def peers_of(length: str, numbers: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the rates that NCCL and NIXL reached in this run."""
    reached = {"NCCL, contiguous": numbers["nccl_gb_s"]}
    reached |= {f"NIXL, blocks of a {kind}": of["gb_s"] for kind, of in numbers.get("nixl", {}).items()}
    return [{"number": f"tokens.{length}.push_gb_s", "peer": name, "value": value} for name, value in reached.items()]


def run(pe: int, folder: str, options: argparse.Namespace) -> None:
    torch.cuda.set_device(pe)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{folder}/store", rank=pe, world_size=2)
    transport = join_island(pe, options.puts)
    results = measure(transport, options.tokens, options.rounds, Budget(options.seconds))
    if pe == SENDER:
        print_result(results | ({"case": "puts"} if options.puts else {}), options, gpus=2)
    transport.close()
    dist.destroy_process_group()


def main() -> None:
    parser = benchmark_parser(__file__, __doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--puts", action="store_true", help="as if the GPUs were not peer to peer")
    add_list(parser, "--tokens", int, default=list(TARGETS), help=f"of a push, multiples of {PAGE}")
    add_seconds(parser)
    options = parser.parse_args()
    if torch.cuda.device_count() < 2:
        print_skipped("needs two CUDA devices of one host")
        return
    run_pes(run, 2, options)


if __name__ == "__main__":
    main()
