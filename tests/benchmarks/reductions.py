"""Sums among the GPUs of a worker's ranks, in a CUDA graph, by bytes, ranks and algorithm. Prints JSON.

µs of a sum of bfloat16, the slowest rank's: the median over replays of a graph with 50 sums. At once: each rank sends
all to all. By parts: each rank adds up a part and sends its sums. Both send packets, half of each the number of the
exchange. Streamed: plain data, and a flag behind each chunk. Where at once and by parts take as long is where
WHOLE_BYTES of device_ranks.py should be, and STREAM_BYTES where streamed sums begin to be the fastest. Ranks that share
a GPU take turns there, so their numbers mean nothing: with fewer GPUs than ranks a case is left out, unless --shared is
given.
"""

import argparse

import torch

from tests.benchmarks.options import add_list, benchmark_parser
from tests.benchmarks.results import Numbers, plot, print_result, print_skipped, rounded
from tests.gpu.pe_process import PeProcess, pe_processes, together
from tests.gpu.rank_process import ALGORITHMS, RankPe, meeting

SIZES = [8 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20, 8 << 20, 64 << 20]
SUMS, REPEATS = 50, 20
SLOT = 1 << 20


def measure(ranks: list[PeProcess], num_bytes: int, algorithm: str) -> float:
    """µs of one sum."""
    sums = max(1, min(SUMS, (256 << 20) // num_bytes))
    together(ranks, "choose", algorithm)
    return 1e6 * max(together(ranks, "seconds_each", num_bytes, sums, REPEATS))


def result_of(found: dict[int, dict[str, list[float]]], sizes: list[int]) -> Numbers:
    """found: µs by ranks and algorithm, of each size."""
    kib = [num_bytes / 1024 for num_bytes in sizes]
    return {
        "kib": kib,
        "microseconds": {
            f"{ranks} ranks, {name}": [rounded(value) for value in values]
            for ranks, each in found.items()
            for name, values in each.items()
        },
        "plots": [plot(f"Sums of {ranks} ranks", "KiB", "µs", kib, each) for ranks, each in found.items()],
    }


def run(options: argparse.Namespace) -> dict[int, dict[str, list[float]]]:
    found: dict[int, dict[str, list[float]]] = {}
    with pe_processes(max(options.ranks), RankPe) as processes:
        for count in options.ranks:
            ranks, names = processes[:count], [name for name in ALGORITHMS if count > 2 or name != "by parts"]
            with meeting(ranks, SLOT):
                found[count] = {
                    name: [measure(ranks, num_bytes, name) for num_bytes in options.bytes] for name in names
                }
    return found


def main() -> None:
    parser = benchmark_parser(__file__, __doc__)
    add_list(parser, "--ranks", int, default=[2, 4])
    add_list(parser, "--bytes", int, default=SIZES)
    parser.add_argument("--shared", action="store_true", help="ranks share GPUs where there are fewer: to try it")
    options = parser.parse_args()
    there = torch.cuda.device_count()
    options.ranks = [count for count in options.ranks if there and (options.shared or count <= there)]
    if not options.ranks:
        print_skipped("needs as many CUDA devices of one host as ranks")
        return
    print_result(result_of(run(options), options.bytes), options, gpus=min(there, max(options.ranks)))


if __name__ == "__main__":
    main()
