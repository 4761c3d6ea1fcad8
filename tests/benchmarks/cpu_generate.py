"""Tokens per second and time per token on a CPU, through the gRPC server, against transformers in the same run.

Tiny Llama (4 layers, hidden 256), float32, greedy. Prints JSON; every ratio is the median over rounds in which the
two sides took turns. Tokens of both sides are equal; where they part, the run ends unless the two best logits there are
closer than float32 rounding can tell apart, and such ties are counted.

    static_batch   32 requests of 128 in, 64 out; tokens/s ÷ one static batch of generate
    mixed          32 requests of mixed lengths; tokens/s ÷ generate_batch (continuous batching, warm)
    lone           one request of 128 in, 64 out; time per output token after the first ÷ generate's
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from tandem.cluster.client import AsyncClient
from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.supervision.launcher import Cluster
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tests.benchmarks.measured import Measured
from tests.benchmarks.options import Budget, add_list, add_seconds, benchmark_parser
from tests.benchmarks.results import at_least, at_most, print_result

Prompts = list[list[int]]
Outputs = list[list[int]]

BATCH, PROMPT_TOKENS, OUTPUT_TOKENS = 32, 128, 64
PARTS = ("static_batch", "mixed", "lone")
TIE = 1e-4  # of logits with a standard deviation of 4
FRESH = 1_000_003  # so that no round finds the prefixes of another in the cache


class Oracle:
    """transformers on the same checkpoint, in this process."""

    def __init__(self, folder: Path) -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.vocab_size = int(self.model.config.vocab_size)
        self.model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0)
        self.model.config.eos_token_id = None

    def _config(self, new_tokens: int) -> GenerationConfig:
        return GenerationConfig(max_new_tokens=new_tokens, do_sample=False, pad_token_id=0, use_cache=True)

    @torch.inference_mode()
    def static_batch(self, prompts: Prompts, new_tokens: int) -> Outputs:
        ids = torch.tensor(prompts)
        out = self.model.generate(  # type: ignore[operator]  # pyright takes it for a tensor
            ids, attention_mask=torch.ones_like(ids), generation_config=self._config(new_tokens)
        )
        return out[:, ids.shape[1] :].tolist()

    @torch.inference_mode()
    def gap(self, tokens: list[int], one: int, other: int) -> float:
        logits = self.model(torch.tensor([tokens])).logits[0, -1]
        return abs(float(logits[one] - logits[other]))

    def continuous(self, prompts: Prompts, new_tokens: int) -> Outputs:
        results = self.model.generate_batch(  # type: ignore[operator]
            inputs=prompts, generation_config=self._config(new_tokens), progress_bar=False
        )
        ordered = sorted(results.items(), key=lambda item: int(item[0].rsplit("_", 1)[-1]))
        return [result.generated_tokens for _, result in ordered]


async def tandem_batch(client: AsyncClient, prompts: Prompts, new_tokens: int) -> tuple[Outputs, list[list[float]]]:
    """All prompts at once; the tokens of each and the times at which they came."""

    async def one(prompt: list[int]) -> tuple[list[int], list[float]]:
        tokens: list[int] = []
        times: list[float] = []
        async for update in client.generate(prompt, max_tokens=new_tokens, temperature=0, ignore_eos=True):
            tokens += update.token_ids
            times += [time.perf_counter()] * len(update.token_ids)
        return tokens, times

    results = await asyncio.gather(*(one(prompt) for prompt in prompts))
    return [tokens for tokens, _ in results], [times for _, times in results]


def random_prompts(lengths: list[int], vocab_size: int, seed: int) -> Prompts:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def seconds_of(call: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = call()
    return time.perf_counter() - began, result


class Comparison:
    """Rounds of the two sides in turn."""

    def __init__(self, address: str, oracle: Oracle, rounds: int, budget: Budget) -> None:
        self.address = address
        self.oracle = oracle
        self.rounds = rounds
        self.budget = budget

    def count_ties(self, prompts: Prompts, ours: Outputs, theirs: Outputs) -> int:
        ties = 0
        for prompt, tokens, expected in zip(prompts, ours, theirs, strict=True):
            if tokens == expected:
                continue
            place = next(i for i, (a, b) in enumerate(zip(tokens, expected, strict=True)) if a != b)
            gap = self.oracle.gap(prompt + expected[:place], tokens[place], expected[place])
            if gap > TIE:
                raise SystemExit(f"tokens differ at output {place}, where the logits are {gap} apart")
            ties += 1
        return ties

    def run(
        self, lengths: list[int], new_tokens: int, oracle_call: Callable[[Prompts, int], Outputs]
    ) -> dict[str, Any]:
        async def all_rounds() -> list[tuple[float, float, list[list[float]]]]:
            nonlocal ties
            rows = []
            async with AsyncClient(self.address) as client:
                for number in self.budget.within(range(self.rounds + 1), least=2):
                    prompts = random_prompts(lengths, self.oracle.vocab_size, number * FRESH + len(lengths))
                    theirs, expected = seconds_of(lambda p=prompts: oracle_call(p, new_tokens))
                    began = time.perf_counter()
                    tokens, times = await tandem_batch(client, prompts, new_tokens)
                    ours = time.perf_counter() - began
                    ties += self.count_ties(prompts, tokens, expected)
                    if number:  # the first one warms up
                        rows.append((ours, theirs, times))
            return rows

        ties = 0
        rows = asyncio.run(all_rounds())
        tokens = len(lengths) * new_tokens
        return {
            "tandem_tokens_per_second": Measured.median(tokens / ours for ours, _, _ in rows),
            "transformers_tokens_per_second": Measured.median(tokens / theirs for _, theirs, _ in rows),
            "ratio": Measured.median(theirs / ours for ours, theirs, _ in rows),
            "ratios": [round(theirs / ours, 3) for ours, theirs, _ in rows],
            "rounds": len(rows),
            "sequences_that_part_at_a_tie": ties,
            "times": [times for _, _, times in rows],
        }


def lone(comparison: Comparison) -> dict[str, Any]:
    """Time per output token after the first; generate's from two lengths of output, its prefill taken out."""
    oracle = comparison.oracle
    result = comparison.run([PROMPT_TOKENS], OUTPUT_TOKENS, oracle.static_batch)
    ours = [(times[0][-1] - times[0][0]) / (OUTPUT_TOKENS - 1) for times in result["times"]]
    theirs = []
    for number in range(result["rounds"]):
        prompts = random_prompts([PROMPT_TOKENS], oracle.vocab_size, number)
        full, _ = seconds_of(lambda p=prompts: oracle.static_batch(p, OUTPUT_TOKENS))
        first, _ = seconds_of(lambda p=prompts: oracle.static_batch(p, 1))
        theirs.append((full - first) / (OUTPUT_TOKENS - 1))
    return {
        "tandem_ms_per_token": Measured.median(ours, 1e3),
        "transformers_ms_per_token": Measured.median(theirs, 1e3),
        "ratio": round(statistics.median(ours) / statistics.median(theirs), 3),
        "rounds": result["rounds"],
        "sequences_that_part_at_a_tie": result["sequences_that_part_at_a_tie"],
    }


def measure(comparison: Comparison, parts: Sequence[str], rows: int) -> dict[str, dict[str, Any]]:
    """Measures the parts that the budget lets begin."""
    oracle, results = comparison.oracle, dict[str, dict[str, Any]]()
    mixed = torch.randint(16, 256, (rows,), generator=torch.Generator().manual_seed(1)).tolist()
    for part in comparison.budget.within(parts):
        if part == "static_batch":
            results[part] = comparison.run([PROMPT_TOKENS] * rows, OUTPUT_TOKENS, oracle.static_batch)
        elif part == "mixed":
            results[part] = comparison.run(mixed, OUTPUT_TOKENS, oracle.continuous)
        else:
            results[part] = lone(comparison)
    for result in results.values():
        result.pop("times", None)
    return results


def targets_of(results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the targets of the parts that were measured."""
    limits = {
        "static_batch": (at_least, "static batch, tokens/s ÷ transformers'", 1.2),
        "mixed": (at_least, "mixed lengths, tokens/s ÷ transformers' generate_batch", 3.0),
        "lone": (at_most, "lone request, time a token ÷ transformers'", 0.8),
    }
    found = ((*limits[part], result["ratio"]) for part, result in results.items())
    return [limit(name, value, bound) for limit, name, bound, value in found]


def main() -> None:
    parser = benchmark_parser(__file__, __doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--set", action="append", default=[], help="dotted.key=value of the cluster's config")
    add_list(parser, "--only", default=PARTS, choices=PARTS)
    parser.add_argument("--rows", type=int, default=BATCH, help="requests at once, of static_batch and mixed")
    add_seconds(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), arch="llama", size="small", seed=0)
        oracle = Oracle(Path(folder))
        overrides = ["name=bench-cpu-generate", "gateway.port=0", f"model.path={folder}", *options.set]
        cluster = Cluster(load_config(None, overrides))
        try:
            comparison = Comparison(cluster.start(), oracle, options.rounds, Budget(options.seconds))
            results = measure(comparison, options.only, options.rows)
        finally:
            cluster.stop()
    case = " ".join([f"{options.rows} rows"] * (options.rows != BATCH) + options.set)
    limits = {"case": case} if case else {"targets": targets_of(results)}
    print_result({"threads": {"torch": torch.get_num_threads()}, **results, **limits}, options)


if __name__ == "__main__":
    main()
