"""Tokens per second and time per token on a CPU, through the gRPC door, against transformers in the same run.

Tiny Llama (4 layers, hidden 256), float32, greedy. Prints JSON; every ratio is the median over rounds in which the
two sides took turns. Tokens of both sides are equal; where they part, the run ends unless the two best logits there are
closer than float32 rounding can tell apart, and such ties are counted.

    static_batch   32 requests of 128 in, 64 out; tokens/s ÷ one static batch of generate
    mixed          32 requests of mixed lengths; tokens/s ÷ generate_batch (continuous batching, warm)
    lone           one request of 128 in, 64 out; time per output token after the first ÷ generate's
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from tandem.cluster.cli.random_checkpoint import make_checkpoint
from tandem.cluster.client import AsyncClient
from tandem.cluster.config import load_config
from tandem.cluster.supervision.launcher import Cluster
from tests.benchmarks.results import print_result

Prompts = list[list[int]]
Outputs = list[list[int]]

BATCH, PROMPT_TOKENS, OUTPUT_TOKENS = 32, 128, 64
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

    def __init__(self, address: str, oracle: Oracle, rounds: int) -> None:
        self.address = address
        self.oracle = oracle
        self.rounds = rounds

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
                for number in range(self.rounds + 1):
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
            "tandem_tokens_per_second": round(statistics.median(tokens / ours for ours, _, _ in rows), 1),
            "transformers_tokens_per_second": round(statistics.median(tokens / theirs for _, theirs, _ in rows), 1),
            "ratio": round(statistics.median(theirs / ours for ours, theirs, _ in rows), 3),
            "ratios": [round(theirs / ours, 3) for ours, theirs, _ in rows],
            "rounds": self.rounds,
            "sequences_that_part_at_a_tie": ties,
            "times": [times for _, _, times in rows],
        }


def lone(comparison: Comparison) -> dict[str, Any]:
    """Time per output token after the first; generate's from two lengths of output, its prefill taken out."""
    oracle = comparison.oracle
    result = comparison.run([PROMPT_TOKENS], OUTPUT_TOKENS, oracle.static_batch)
    ours = [(times[0][-1] - times[0][0]) / (OUTPUT_TOKENS - 1) for times in result["times"]]
    theirs = []
    for number in range(comparison.rounds):
        prompts = random_prompts([PROMPT_TOKENS], oracle.vocab_size, number)
        full, _ = seconds_of(lambda p=prompts: oracle.static_batch(p, OUTPUT_TOKENS))
        first, _ = seconds_of(lambda p=prompts: oracle.static_batch(p, 1))
        theirs.append((full - first) / (OUTPUT_TOKENS - 1))
    return {
        "tandem_ms_per_token": round(statistics.median(ours) * 1e3, 3),
        "transformers_ms_per_token": round(statistics.median(theirs) * 1e3, 3),
        "ratio": round(statistics.median(ours) / statistics.median(theirs), 3),
        "rounds": comparison.rounds,
        "sequences_that_part_at_a_tie": result["sequences_that_part_at_a_tie"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--set", action="append", default=[], help="dotted.key=value of the cluster's config")
    parser.add_argument("--only", choices=["static_batch", "mixed", "lone"], default=None)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), arch="llama", size="small", seed=0)
        oracle = Oracle(Path(folder))
        overrides = ["name=bench-cpu-generate", "gateway.port=0", f"model.path={folder}", *arguments.set]
        cluster = Cluster(load_config(None, overrides))
        try:
            comparison = Comparison(cluster.start(), oracle, arguments.rounds)
            mixed = torch.randint(16, 256, (BATCH,), generator=torch.Generator().manual_seed(1)).tolist()
            results: dict[str, dict[str, Any]] = {"threads": {"torch": torch.get_num_threads()}}
            if arguments.only in (None, "static_batch"):
                results["static_batch"] = comparison.run([PROMPT_TOKENS] * BATCH, OUTPUT_TOKENS, oracle.static_batch)
            if arguments.only in (None, "mixed"):
                results["mixed"] = comparison.run(mixed, OUTPUT_TOKENS, oracle.continuous)
            if arguments.only in (None, "lone"):
                results["lone"] = lone(comparison)
        finally:
            cluster.stop()
    for result in results.values():
        result.pop("times", None)
    print_result(results)


if __name__ == "__main__":
    main()
