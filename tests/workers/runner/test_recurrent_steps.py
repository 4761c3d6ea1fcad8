"""Models with recurrent layers by the kernels of a GPU, in Triton's interpreter: prompts in chunks, then steps in graph
buffers, each launched before the tokens of the one before are read, against transformers."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tandem.cache.kernels.base import GroupPlan, Limits
from tandem.cache.kernels.delta.kernels import DeltaRuns, DeltaSteps, TritonDeltaKernels
from tandem.cache.kernels.recurrent import RecurrentInputs
from tandem.cache.kinds.kind import Site
from tandem.cache.kinds.recurrent import Recurrent
from tandem.cache.plan.pool_sizes import SnapshotRule
from tandem.workers.config import SpeculationSettings
from tandem.workers.runner.step_inputs import ON_HOST
from tandem.workers.sampling.pending_samples import PendingSamples
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.sampling.sampling_params import SamplingParams
from tests.cache.table_kernels import TableKernels
from tests.support.cached_model import CachedModel
from tests.support.checkpoints import make_model, save_checkpoint, sizes_for_ranks
from tests.support.draft_heads import save_mtp
from tests.support.oracle import greedy, greedy_all, load_oracle, random_prompt
from tests.support.prompt_programs import PAGE, PromptRunner, RunInOnePlace
from tests.support.thread_ranks import RankInTurns, on_all, ranks_in_turns
from tests.workers.loop_pair import LoopPair

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="models on a CPU need Triton's interpreter")
LENGTHS = (1, 63, 65, 5)
# How many of the sequences, from the first, are stepped: graphs of 1, 2 and 4 rows, and rows of padding.
PROGRAM = (4, 4, 3, 1, 2, 4, 1)


@pytest.fixture
def on_triton(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Makes Triton's kernels serve states. Returns the rows of each step in graph buffers, one entry a layer."""
    rows: list[int] = []
    run, verify_runs = DeltaSteps.run, DeltaRuns.run

    def watched(own: DeltaSteps, plan: GroupPlan, layer: int, x: RecurrentInputs) -> Tensor:
        rows.append(own.rows.pages.shape[0])
        return run(own, plan, layer, x)

    def watched_runs(own: DeltaRuns, plan: GroupPlan, layer: int, x: RecurrentInputs) -> Tensor:
        rows.append(own.runs.rows.pages.shape[0])
        return verify_runs(own, plan, layer, x)

    def backend(kind: Recurrent, site: Site) -> TritonDeltaKernels:
        return TritonDeltaKernels(site.pool, kind.shape)

    monkeypatch.setattr(Recurrent, "backend", backend)
    monkeypatch.setattr(DeltaSteps, "run", watched)
    monkeypatch.setattr(DeltaRuns, "run", watched_runs)
    return rows


@pytest.mark.gate("qwen3_next-options")
@pytest.mark.parametrize("case", ["qwen3_5", "qwen3_next", "qwen3_next-options", "nemotron_h", "nemotron_h-options"])
def test_steps_in_graphs_go_on_from_prompts_in_chunks(case: str, tmp_path: Path, on_triton: list[int]) -> None:
    folder = save_checkpoint(case, tmp_path)
    prompts = {sequence: random_prompt(length, length) for sequence, length in enumerate(LENGTHS)}
    expected = greedy_all(load_oracle(folder), list(prompts.values()), 1 + len(PROGRAM))
    of = PromptRunner(folder, None, TableKernels)
    of.runner.capture_steps(4, RunInOnePlace())
    on_triton.clear()
    lengths = {sequence: len(prompt) for sequence, prompt in prompts.items()}
    for sequence in prompts:
        of.cache.add_sequence(sequence)
    of.forward({sequence: prompt[:-2] for sequence, prompt in prompts.items() if len(prompt) > 2}, lengths)
    # Rows of a token and chunks in one forward.
    logits = of.forward({sequence: prompt[-2:] for sequence, prompt in prompts.items()}, lengths)
    assert not on_triton
    made = sample(of, logits, LENGTHS)
    run_steps(of, made, PROGRAM)
    assert made == [wanted[: len(tokens)] for tokens, wanted in zip(made, expected, strict=True)]
    assert set(on_triton) == {1, 2, 4}


@pytest.mark.long
@pytest.mark.parametrize("case", ["kimi_linear", "kimi_linear-options"])
def test_steps_beside_latents_go_on_from_prompts_in_chunks(case: str, tmp_path: Path, on_triton: list[int]) -> None:
    """There are no graph buffers, which the reference of latents has not."""
    folder = save_checkpoint(case, tmp_path)
    prompts = [random_prompt(2 * cut + 1, seed=cut) for cut in LENGTHS[:3]]
    expected = greedy_all(load_oracle(folder), prompts, 7)
    model = CachedModel(folder, "float32", "cpu")
    made = []
    for sequence, (prompt, cut) in enumerate(zip(prompts, LENGTHS[:3], strict=True)):
        model.cache.add_sequence(sequence)
        made.append(model.sample(model.feed(sequence, prompt, [cut])))
    for _ in range(6):
        found = model.sample(model.step({sequence: tokens[-1:] for sequence, tokens in enumerate(made)}))
        for tokens, token in zip(made, found, strict=True):
            tokens.append(token)
    assert made == expected


@pytest.mark.long
def test_steps_in_graphs_leave_snapshots(tmp_path: Path, on_triton: list[int]) -> None:
    """Sequences go back to those, one in the middle and one at its last full page, and go on as before."""
    folder = save_checkpoint("qwen3_next-options", tmp_path)
    prompts = {sequence: random_prompt(length, length) for sequence, length in enumerate((21, 30))}
    expected = greedy_all(load_oracle(folder), list(prompts.values()), 15)
    of = PromptRunner(folder, None, TableKernels, snapshots=SnapshotRule(2 * PAGE, 20))
    of.runner.capture_steps(2, RunInOnePlace())
    lengths = {sequence: len(prompt) for sequence, prompt in prompts.items()}
    for sequence in prompts:
        of.cache.add_sequence(sequence)
    made = sample(of, of.forward(prompts, lengths), list(lengths.values()))
    run_steps(of, made, [2] * 14)
    assert made == expected
    for sequence, position in enumerate((4 * PAGE, 5 * PAGE)):
        of.cache.pop(sequence, of.cache.num_tokens(sequence) - position)
        del made[sequence][position - lengths[sequence] + 1 :]
    run_steps(of, made, [2] * 3)
    assert made == [wanted[: len(tokens)] for tokens, wanted in zip(made, expected, strict=True)]


def test_a_step_that_leaves_a_snapshot_is_not_prepared_early(tmp_path: Path, on_triton: list[int]) -> None:
    """The sequences are being received. The snapshot's page is set aside with the step itself."""
    of = PromptRunner(save_checkpoint("qwen3_next-options", tmp_path), None, TableKernels)
    (buffers,) = of.cache.graph_buffers([Limits.of_step(1, 4, 1)])
    for length in (2 * PAGE - 2, 2 * PAGE - 1, 2 * PAGE):
        of.cache.add_sequence(length)
        of.cache.reserve(length, 3 * PAGE)
        of.cache.prepare_receive(length, length)
        foreseen = of.cache.foresee(buffers, [length], [np.zeros(1, np.int64)])
        assert (foreseen is None) == ((length + 1) % PAGE == 0)


# Of each verify step and sequence how many tokens are drafted, and how many of these are right.
DRAFTS = [((3, 1), (1, 1)), ((2, 0), (0, 0)), ((1, 3), (1, 1))]


@pytest.mark.long
@pytest.mark.parametrize("captured", [True, False])
def test_drafts_are_verified(captured: bool, tmp_path: Path, on_triton: list[int]) -> None:
    """Steps of the graphs go on after what held. What the steps have left is a prefix for another sequence."""
    folder = save_checkpoint("qwen3_next-options", tmp_path)
    prompts = {sequence: random_prompt(length, length) for sequence, length in enumerate((21, 12))}
    expected = greedy_all(load_oracle(folder), list(prompts.values()), 12)
    of = PromptRunner(folder, None, TableKernels, snapshots=SnapshotRule(2 * PAGE, 20, 2))
    of.runner.capture_steps(2, RunInOnePlace())
    if captured:
        of.runner.capture_verification(6, RunInOnePlace())
        assert of.runner.next_drafts is None
    lengths = {sequence: len(prompt) for sequence, prompt in prompts.items()}
    for sequence in prompts:
        of.cache.add_sequence(sequence)
    made = sample(of, of.forward(prompts, lengths), list(lengths.values()))
    on_triton.clear()
    for sizes, right in DRAFTS:
        verify(of, made, expected, lengths, sizes, right)
    assert bool(on_triton) == captured
    run_steps(of, made, [2] * 3)
    assert made == [wanted[: len(tokens)] for tokens, wanted in zip(made, expected, strict=True)]
    whole = prompts[0] + made[0]
    of.cache.publish_prefix(0, np.array(whole[:-1]))
    of.cache.add_sequence(2)
    found = of.cache.match_prefix(2, np.array(whole))
    assert found == (len(whole) - 1) // PAGE * PAGE > lengths[0]
    logits = of.forward({2: whole[found:]}, {2: len(whole)})
    assert int(logits.argmax()) == expected[0][len(made[0])]


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "size"), [("qwen3_next-options", 2), ("qwen3_next", 2), ("qwen3_next", 4), ("qwen3_5", 4)]
)
def test_ranks_compute_their_heads_in_graphs(case: str, size: int, tmp_path: Path, on_triton: list[int]) -> None:
    """Prompts, steps and verify steps. Of four ranks two share a key head each."""
    make_model(case, **sizes_for_ranks(case, size)).save_pretrained(tmp_path)
    prompts = {sequence: random_prompt(length, length) for sequence, length in enumerate((66, 12))}
    expected = greedy_all(load_oracle(tmp_path), list(prompts.values()), 12)

    def run(rank: RankInTurns) -> list[list[int]]:
        with rank.turn:
            of = PromptRunner(tmp_path, None, TableKernels, snapshots=SnapshotRule(2 * PAGE, 20, 2), ranks=rank)
            of.runner.capture_steps(2, RunInOnePlace())
            of.runner.capture_verification(6, RunInOnePlace())
            lengths = {sequence: len(prompt) for sequence, prompt in prompts.items()}
            for sequence in prompts:
                of.cache.add_sequence(sequence)
            made = sample(of, of.forward(prompts, lengths), list(lengths.values()))
            run_steps(of, made, (1, 2))
            for sizes, right in DRAFTS[:2]:
                verify(of, made, expected, lengths, sizes, right)
            run_steps(of, made, [2] * 2)
        return made

    for made in on_all([partial(run, rank) for rank in ranks_in_turns(size)]):
        assert made == [wanted[: len(tokens)] for tokens, wanted in zip(made, expected, strict=True)]
    assert on_triton


@pytest.mark.long
@pytest.mark.parametrize("method", ["draft_model", "mtp"])
def test_a_model_drafts_beside_states(
    method: Literal["draft_model", "mtp"], tmp_path: Path, on_triton: list[int]
) -> None:
    """Workers with graphs of steps, verify steps and drafts. States stay as they are while another model drafts, or the
    layer of the checkpoint."""
    target = save_mtp(tmp_path / "target", "qwen3_next-options")
    oracle = load_oracle(target)
    drafter = save_checkpoint("llama", tmp_path / "drafter")
    speculation = SpeculationSettings(method, 3, 8, draft=str(drafter) if method == "draft_model" else "")
    loops = LoopPair(
        target,
        num_pages=64,
        speculation=speculation,
        kernels=TableKernels,
        sharing=True,
        snapshots=SnapshotRule(2 * PAGE, 20, 4),
    )
    for runner in loops.runners:
        runner.capture_steps(2, RunInOnePlace())
        runner.capture_verification(8, RunInOnePlace())
        runner.capture_drafts(2, 3, RunInOnePlace())
    for index, length in enumerate((3, 24, 45)):
        prompt = random_prompt(length, seed=length)
        assert loops.complete(str(index), prompt, 20) == greedy(oracle, prompt, 20)
    assert loops.decode_counters.drafted_tokens
    loops.assert_free()


def verify(
    of: PromptRunner,
    made: list[list[int]],
    expected: list[list[int]],
    lengths: dict[int, int],
    sizes: Sequence[int],
    right: Sequence[int],
) -> None:
    """A verify step of all sequences. After the drafted tokens that are right come others."""
    tokens = []
    for sequence, (size, held) in enumerate(zip(sizes, right, strict=True)):
        done = len(made[sequence])
        wrong = [(token + 1) % 2 for token in range(size - held)]
        tokens.append(np.array([made[sequence][-1], *expected[sequence][done : done + held], *wrong]))
    sampling = SampleBatch.from_params([SamplingParams(temperature=0)] * len(sizes))
    positions = np.array([lengths[sequence] + len(one) for sequence, one in enumerate(made)])
    samples = of.runner.verify(list(lengths), tokens, sampling, positions).wait().token_ids.tolist()
    for sequence, (size, held) in enumerate(zip(sizes, right, strict=True)):
        made[sequence] += samples[: held + 1]
        del samples[: size + 1]
    of.cache.pop_each(list(lengths), np.array(sizes) - np.array(right))


def sample(of: PromptRunner, logits: Tensor, lengths: Sequence[int]) -> list[list[int]]:
    """The first token of each prompt."""
    greedy = SampleBatch.from_params([SamplingParams(temperature=0)] * len(lengths))
    return [[int(token)] for token in of.runner.sample(logits, greedy, np.array(lengths)).token_ids]


def run_steps(of: PromptRunner, made: list[list[int]], program: Sequence[int]) -> None:
    """Runs steps, each with so many of the sequences, from the first."""
    before: list[int] = []
    pending: PendingSamples | None = None
    for count in program:
        rows = list(range(count))[::-1]
        sources = np.array([before.index(row) if row in before else ON_HOST for row in rows])
        inputs = np.array([made[row][-1] for row in rows])
        positions = np.array([of.cache.num_tokens(row) + 1 for row in rows])
        sampling = SampleBatch.from_params([SamplingParams(temperature=0)] * count)
        following = of.runner.step(tuple(rows), inputs, sources, sampling, positions)
        learn(made, before, pending)
        before, pending = rows, following
    learn(made, before, pending)


def learn(made: list[list[int]], rows: list[int], pending: PendingSamples | None) -> None:
    """Adds the tokens of a step to its rows' tokens."""
    if pending is not None:
        for row, token in zip(rows, pending.wait().token_ids.tolist(), strict=True):
            made[row].append(token)
