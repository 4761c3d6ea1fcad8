"""Measures what the CUDA graphs of a worker take, by kind, on one GPU, no cluster. Prints JSON.

seconds     to capture all graphs of the kind
allocator   MiB that torch holds for their temporaries and results
driver      MiB beside that: the instantiated graphs
--keep also measures graphs that keep a result each.
"""

import gc
import time
from collections.abc import Callable
from contextlib import nullcontext
from unittest.mock import patch

import torch

from tests.benchmarks.mixed_orders import ORDERS, in_order
from tests.benchmarks.model_shapes import SHAPES
from tests.benchmarks.options import add_list, benchmark_parser
from tests.benchmarks.results import print_result
from tests.benchmarks.step_bench import MAX_LENGTH, Bench

MIB = 1 << 20


def measured(capture: Callable[[], object]) -> dict[str, float]:
    """Returns what a capture leaves in use."""

    def in_use() -> tuple[int, int]:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free, torch.cuda.memory_reserved()

    used, reserved = in_use()
    began = time.perf_counter()
    capture()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    used_now, reserved_now = in_use()
    allocator = reserved_now - reserved
    driver = used_now - used - allocator
    return {"seconds": round(seconds, 2), "allocator": round(allocator / MIB), "driver": round(driver / MIB)}


def main() -> None:
    parser = benchmark_parser(__file__, __doc__)
    parser.add_argument("--model", default="qwen3-8b", choices=SHAPES)
    parser.add_argument("--sequences", type=int, default=512, help="most rows of a step")
    parser.add_argument("--keep", action="store_true", help="also with results of their own")
    add_list(parser, "--orders", str, default=("beside",), choices=list(ORDERS), help="of joint steps")
    options = parser.parse_args()
    runner = Bench(options.model, options.sequences, MAX_LENGTH).runner
    result: dict[str, object] = {}
    for keep in (False, True) if options.keep else (False,):
        kept = patch("tandem.workers.runner.forward_graphs.borrow", lambda tensor: tensor) if keep else nullcontext()
        with kept:
            runner._graphs = runner._prompt_graphs = None
            of = ", results kept" if keep else ""
            result[f"steps{of}"] = measured(lambda: runner.capture_steps(options.sequences))
            result[f"prompts{of}"] = measured(lambda: runner.capture_prompts(8192))
            for order in options.orders:
                with in_order(order):
                    result[f"joint steps, {order}{of}"] = measured(runner.capture_steps_with_prompts)
                rows, chunks = runner.graph_sizes.rows, runner.graph_sizes.chunks
                result["joint graphs"] = len(rows) * len(chunks)
                assert runner._graphs is not None
                runner._graphs._mixed = None
            print(result, flush=True)
    print_result(result, options, gpus=1)


if __name__ == "__main__":
    main()
