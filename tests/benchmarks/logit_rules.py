"""Measures what penalties, bias and grammars cost a decode step, one GPU, no cluster; prints JSON.

A step of all rows is timed as steps.py does it, first without any LogitRules, then with those of some rows or all:
penalties (all three, 16 biased tokens, min_tokens and stop tokens) and json (an array of objects by a schema). Masks
are those of llguidance over the tokens that random weights sample, and the vocabulary is the model's.
to_plain: ÷ the step without rules, of the same run.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tandem.workers.sampling.guided import Constraint, Grammars, Guided, masks_of
from tandem.workers.sampling.logit_rules import LogitRules
from tandem.workers.sampling.pending_samples import LateSamples
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.sampling.sampling_params import SamplingParams
from tests.benchmarks.model_shapes import SHAPES, shape_name
from tests.benchmarks.options import add_list, benchmark_parser
from tests.benchmarks.results import at_most, print_result, print_skipped, rounded
from tests.benchmarks.step_bench import MAX_LENGTH, STEPS, WARM_STEPS, Bench

SCHEMA = """{"type": "array", "minItems": 1000, "items": {"type": "object", "required": ["name", "age"],
 "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 999}}}}"""
PENALTIES = SamplingParams(
    temperature=0,
    presence_penalty=0.5,
    frequency_penalty=0.5,
    repetition_penalty=1.1,
    logit_bias=tuple((token, 1.0) for token in range(100, 116)),
    min_tokens=10_000,
)
PLAIN = SamplingParams(temperature=0)
END = 1  # the end token of the small tokenizer that masks are made of
FEW = 8  # rows with rules beside others
ALL_LIMIT, FEW_LIMIT = 1.2, 1.02

MakeRules = Callable[[int], tuple[LogitRules, Constraint | None]]


class RulesBench(Bench):
    def seconds(self, rows: int, context: int, make_rules: MakeRules | None, ruled: int) -> float:
        """Returns the mean seconds of a step over STEPS; the first `ruled` rows have rules."""
        ids, stored = tuple(range(rows)), np.full(rows, context)
        for sequence in ids:
            self.cache.add_sequence(sequence)
            self.cache.prepare_receive(sequence, context)
            self.cache.finish_receive(sequence)
        made = [make_rules(context) if make_rules and row < ruled else (None, None) for row in range(rows)]
        rules, constraints = [one for one, _ in made], [one for _, one in made]
        sampling = SampleBatch.from_params([PLAIN if one is None else one.params for one in rules], rules)
        grammars = [(row, one) for row, one in enumerate(constraints) if one is not None]
        tokens = np.ones(rows, np.int64)
        began = 0.0
        flight = self.runner.step(ids, tokens, np.full(rows, -1), sampling, stored)
        for step in range(1, WARM_STEPS + STEPS + 1):
            if step == WARM_STEPS:
                began = time.perf_counter()
            if isinstance(flight, LateSamples):
                flight.launch(masks_of(constraints))
            following = self.runner.step(ids, tokens, np.arange(rows), sampling, stored + step)
            sampled = flight.wait().token_ids
            for row, constraint in grammars:
                constraint.follow([int(sampled[row])])
            flight = following
        if isinstance(flight, LateSamples):
            flight.launch(masks_of(constraints))
        seconds = (time.perf_counter() - began) / (STEPS + 1)
        flight.wait()
        torch.cuda.synchronize()
        for sequence in ids:
            self.cache.remove_sequence(sequence)
        errors = {constraint.error for _, constraint in grammars} - {None}
        if errors:
            raise RuntimeError(f"a grammar was left: {errors}")
        return seconds


def penalised(context: int) -> tuple[LogitRules, None]:
    prompt = np.random.default_rng(0).integers(0, 150_000, context)
    return LogitRules(PENALTIES, frozenset((END,)), prompt, 0, context), None


def main() -> None:
    parser = benchmark_parser(__file__, __doc__)
    parser.add_argument("--model", type=shape_name, default="qwen3-8b", choices=list(SHAPES))
    add_list(parser, "--rows", int, default=(1, 64, 256), help="of a step")
    parser.add_argument("--context", type=int, default=1024, help="positions of each row")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print_skipped("needs a CUDA device")
        return
    most = max(options.rows)
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder) / "tokenizer", arch="llama", size="tiny", seed=0)
        bench = RulesBench(options.model, most, most * (options.context + 2 * STEPS) + MAX_LENGTH)
        grammars = Grammars(Path(folder) / "tokenizer", bench.config.vocab_size, (END,))

        def guided(context: int) -> tuple[LogitRules, Constraint]:
            """Makes the rules and the constraint of one row that follows SCHEMA."""
            constraint = grammars.constraint(Guided("json_schema", (SCHEMA,)))
            return LogitRules(PLAIN, frozenset((END,)), np.ones(context, np.int64), 0, context, guided=True), constraint

        result: dict[str, dict[str, float]] = {}
        targets = []
        for rows in options.rows:
            plain = bench.seconds(rows, options.context, None, 0)
            result[f"{rows} rows, none"] = {"ms": rounded(1e3 * plain)}
            for name, make_rules in (("penalties", penalised), ("json", guided)):
                for ruled in sorted({min(FEW, rows), rows}):
                    seconds = bench.seconds(rows, options.context, make_rules, ruled)
                    title = f"{rows} rows, {ruled} with {name}"
                    result[title] = {"ms": rounded(1e3 * seconds), "to_plain": rounded(seconds / plain)}
                    targets.append(at_most(title, seconds / plain, ALL_LIMIT if ruled == rows else FEW_LIMIT))
        grammars.close()
    print_result({"device": torch.cuda.get_device_name()} | result | {"targets": targets}, options, gpus=1)


if __name__ == "__main__":
    main()
