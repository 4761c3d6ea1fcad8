"""Pushes of Qwen3-8B's KV between workers of unlike ranks, on two GPUs, one a worker. Prints JSON.

36 layers, 8 KV heads of 128, bf16, page 16. Page tables are random. The ranks of a worker share its GPU, so that all
bytes cross one link; idle workers make up for those that a GPU has less than the other. A push is what each rank of
the sender writes to each rank of the receiver that holds heads of its own: seconds from the first call to the last
quiet, the median over the rounds. W is one copy of 1 GiB into the peer's memory. Ranks of the sender begin together,
and the slowest counts. issue_us: until the call of the first rank returns.
"""

import argparse
import time
from typing import Any

import torch
import torch.distributed as dist

from tandem.cache.kinds.kv import KV
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.shard import Shard
from tandem.transfer.membership import TransportConfig
from tandem.transfer.rank_transport import RankTransport, config_below
from tandem.transfer.recall import mailbox_rows
from tests.benchmarks.measured import Measured, rounded
from tests.benchmarks.options import add_list, benchmark_parser
from tests.benchmarks.pes import run_pes
from tests.benchmarks.push import NUM_PAGES, PAGE, WARM_UP, random_pages, slots_of
from tests.benchmarks.results import at_least, print_result, print_skipped

HEADS, LAYERS, HEAD_DIM, SIGNALS = 8, 36, 128, 8
CASES = {"1 to 2": (1, 2), "2 to 1": (2, 1), "2 to 2": (2, 2)}
LENGTHS = (1024, 8192, 32_768)
TARGET = 0.85
GIB = 1 << 30


def layout_of(rank: int, size: int) -> KVLayout:
    shard = Shard(rank, size)
    kind = KV(len(shard.kv_heads("heads", HEADS)), HEAD_DIM, replicas=shard.replicas("heads", HEADS))
    return KVLayout((LayerGroup(tuple(range(LAYERS)), kind),), PAGE, torch.bfloat16, None, shard)


def exchange(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def gpus_of(sizes: tuple[int, int]) -> list[int]:
    """Returns the GPU of each PE: the ranks of both workers, then idle ones, until both GPUs have as many."""
    idle = [0] * max(0, sizes[1] - sizes[0]) + [1] * max(0, sizes[0] - sizes[1])
    return [0] * sizes[0] + [1] * sizes[1] + idle


def join(pe: int, sizes: tuple[int, int]) -> RankTransport:
    from tandem.transfer.nvshmem.transport import NvshmemTransport  # needs a GPU's packages

    of_workers = [*sizes, *[1] * (len(gpus_of(sizes)) - sum(sizes))]
    worker, rank = [(worker, rank) for worker, size in enumerate(of_workers) for rank in range(size)][pe]
    workers = [[layout_of(rank, size) for rank in range(size)] for size in of_workers]
    signals = mailbox_rows(SIGNALS, len(workers))
    config = TransportConfig(worker, len(workers), workers[worker][rank], (NUM_PAGES,), signals, "bench-rank-push", 1)
    transport = RankTransport(NvshmemTransport(config_below(config, workers, rank)), workers, worker, signals)
    transport.join(exchange(transport.open()))
    return transport


def seconds_of(transport: RankTransport, length: int, rounds: int) -> tuple[Measured, Measured]:
    """Returns the seconds of a push by the sender's slowest rank, on all PEs, and of its call, at the sender."""
    tables = [tuple(map(slots_of, random_pages(length, seed))) for seed in range(rounds + WARM_UP)]
    found, issued = [], []
    for sources, targets in tables:
        torch.cuda.synchronize()
        dist.barrier()
        began = time.perf_counter()
        if transport.pe == 0:
            transport.write_slots(1, 0, sources, targets)
            issued.append(time.perf_counter() - began)
            fence = transport.fence(1)
            while not fence.is_quiet():
                pass
        found.append(max(exchange(time.perf_counter() - began if transport.pe == 0 else 0.0)))
    return Measured.median(found[WARM_UP:]), Measured.median(issued[WARM_UP:] or [0.0])


def roof(pe: int) -> float:
    """Bytes a second of one copy to the other GPU, by PE 0."""
    best = 0.0
    if pe == 0:
        source = torch.zeros(GIB, dtype=torch.uint8, device="cuda:0")
        target = torch.zeros(GIB, dtype=torch.uint8, device="cuda:1")
        for _ in range(5):
            torch.cuda.synchronize()
            began = time.perf_counter()
            target.copy_(source)
            torch.cuda.synchronize()
            best = max(best, GIB / (time.perf_counter() - began))
    dist.barrier()
    return best


def check_landed(transport: RankTransport, sizes: tuple[int, int], length: int, seed: int) -> None:
    """The last round's pages hold the same bits on both sides."""
    sums: dict[tuple[int, int], int] = {}
    source, target = random_pages(length, seed)
    pages = torch.from_numpy(source if transport.pe == 0 else target).long().cuda()
    if transport.pe < len(sizes):
        heads = Shard(transport.rank, sizes[transport.pe]).kv_heads("heads", HEADS)
        words = transport.pools[0].view(torch.int16)
        for at, head in enumerate(heads):
            sums[transport.pe, head] = int(words[pages, :, :, at].long().sum())
    found = {key: value for one in exchange(sums) for key, value in one.items()}
    wrong = [head for head in range(HEADS) if found[0, head] != found[1, head]]
    if wrong:
        raise SystemExit(f"{length} tokens: heads {wrong} did not land as sent")


def run(pe: int, folder: str, name: str, options: argparse.Namespace) -> None:
    sizes = CASES[name]
    gpus = gpus_of(sizes)
    torch.cuda.set_device(gpus[pe])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=pe, world_size=len(gpus))
    link = roof(pe)
    transport = join(pe, sizes)
    transport.pools[0].normal_(generator=torch.Generator("cuda").manual_seed(pe))
    torch.cuda.synchronize()
    dist.barrier()
    found, targets = {}, []
    for length in options.tokens:
        seconds, issue = seconds_of(transport, length, options.rounds)
        check_landed(transport, sizes, length, options.rounds + WARM_UP - 1)
        rate = length * layout_of(0, 1).token_bytes / seconds
        found[str(length)] = {"gb_s": rounded(rate / 1e9), "us": seconds.scaled(1e6), "issue_us": issue.scaled(1e6)}
        if pe == 0:
            found[str(length)]["to_W"] = rounded(rate / link)
            targets.append(at_least(f"{name} ranks: push of {length // 1024}K ÷ W", rate / link, TARGET))
    if pe == 0:
        print_result(
            {"case": name, "W_gb_s": rounded(link / 1e9), "tokens": found, "targets": targets}, options, gpus=2
        )
    transport.close()
    dist.destroy_process_group()


def main() -> None:
    parser = benchmark_parser(__file__, __doc__)
    parser.add_argument("--rounds", type=int, default=20)
    add_list(parser, "--cases", str, default=list(CASES), help="of " + ", ".join(CASES))
    add_list(parser, "--tokens", int, default=list(LENGTHS), help=f"of a push, multiples of {PAGE}")
    options = parser.parse_args()
    if torch.cuda.device_count() < 2:
        print_skipped("needs two CUDA devices of one host")
        return
    for name in options.cases:
        run_pes(run, len(gpus_of(CASES[name])), name, options)


if __name__ == "__main__":
    main()
