"""Steps of rows with LogitRules, in graphs, in joint forwards and eager, against transformers and a naive version."""

from pathlib import Path

import numpy as np
import pytest

from tandem.workers.runner.step_inputs import ON_HOST
from tandem.workers.sampling.logit_rules import LogitRules
from tandem.workers.sampling.pending_samples import PendingSamples
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.sampling.sampling_params import SamplingParams
from tests.cache.table_kernels import TableKernels
from tests.support.checkpoints import save_checkpoint
from tests.support.naive_rules import generate, random_params
from tests.support.oracle import load_oracle, random_prompt
from tests.support.prompt_programs import PromptRunner, RunInOnePlace
from tests.support.steps_with_prompts import DRAWN, Beside

VOCAB, NUM_TOKENS = 199, 14
PROMPTS = [random_prompt(9 + 5 * row, row) for row in range(5)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("qwen3", tmp_path_factory.mktemp("rules"))


def rows() -> list[SamplingParams]:
    """Greedy and drawn ones; one without rules, one with log-probabilities."""
    drawn = {"temperature": 1.2, "top_p": 0.9, "seed": 4, "max_tokens": NUM_TOKENS}
    greedy = {"temperature": 0.0, "seed": 1, "max_tokens": NUM_TOKENS}
    given = [
        random_params(seed, VOCAB, PROMPTS[seed], **(drawn if seed % 2 else greedy), presence_penalty=0.5)
        for seed in range(4)
    ]
    return [*given, SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=1)]


@pytest.mark.parametrize("overlaps", [True, False], ids=["in graphs", "eager"])
def test_tokens_are_those_of_naive_rules(folder: Path, overlaps: bool) -> None:
    """In graphs each step is launched before the tokens of the step before are read."""
    params = rows()
    of = PromptRunner(folder, None, TableKernels)
    if overlaps:
        of.runner.capture_steps(8, RunInOnePlace())
    ids = tuple(range(len(params)))
    for sequence in ids:
        of.cache.add_sequence(sequence)
    prompts = dict(enumerate(PROMPTS))
    logits = of.forward(prompts, {sequence: len(prompt) for sequence, prompt in prompts.items()})
    lengths = np.array([len(prompt) for prompt in PROMPTS])

    def batch(outputs: list[list[int]]) -> SampleBatch:
        given = zip(params, PROMPTS, outputs, strict=True)
        rules = [
            LogitRules(one, frozenset(one.stop_token_ids), np.array(prompt + output), len(output), len(prompt))
            if one.changes_logits
            else None
            for one, prompt, output in given
        ]
        return SampleBatch.from_params(params, rules)

    tokens = [of.runner.sample(logits, batch([[] for _ in params]), lengths).token_ids]
    sampling, pending = batch([[token] for token in tokens[0].tolist()]), list[PendingSamples]()
    for step in range(1, NUM_TOKENS):
        on_host = step == 1 or not overlaps
        sources = np.full(len(params), ON_HOST) if on_host else np.arange(len(params))
        pending.append(of.runner.step(ids, tokens[-1], sources, sampling, lengths + step))
        if not overlaps or step > 1:
            tokens.append(pending.pop(0).wait().token_ids)
    tokens += [one.wait().token_ids for one in pending]
    model = load_oracle(folder)
    for row, (prompt, one) in enumerate(zip(PROMPTS, params, strict=True)):
        expected = generate(model, prompt, one)
        assert [int(step[row]) for step in tokens[: len(expected)]] == expected


def test_a_joint_forward_gives_what_two_give(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = SampleBatch.from_params

    def with_rules(params: list[SamplingParams]) -> SampleBatch:
        rules = [
            LogitRules(SamplingParams(frequency_penalty=1.0, presence_penalty=1.0), frozenset(), np.array([7]), 1, 9)
            for _ in params
        ]
        return made(params, rules)

    plain = Beside(folder, capture=RunInOnePlace(), together=True, params=DRAWN, kernels=TableKernels)
    monkeypatch.setattr(SampleBatch, "from_params", with_rules)
    together, apart = (
        Beside(folder, capture=RunInOnePlace(), together=each, params=DRAWN, kernels=TableKernels)
        for each in (True, False)
    )
    tokens = [[one.token_ids.tolist() for one in run.samples] for run in (together, apart, plain)]
    assert tokens[0] == tokens[1] != tokens[2]
