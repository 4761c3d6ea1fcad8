"""Rows that follow grammars beside rows that do not, in the loop of a decode worker, with a real model."""

import random
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest

from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tandem.workers.config import SpeculationSettings
from tandem.workers.engine.step import Launched, Step
from tandem.workers.errors import ForwardFailed
from tandem.workers.requests.token_stream import TokenStream
from tandem.workers.sampling.guided import Constraint, Grammars, Guided, masks_of
from tandem.workers.sampling.sampling_params import SamplingParams
from tests.cache.table_kernels import TableKernels
from tests.support.likely_drafters import make_head, make_llama
from tests.support.oracle import random_prompt
from tests.support.prompt_programs import RunInOnePlace
from tests.support.prompt_specs import spec_of
from tests.workers.loop_pair import DECODE, NO_SPECULATION, PREFILL, LoopPair

VOCAB, EOS, OUTPUT = 512, 1, 24
GUIDES = [
    Guided("regex", ("(ab|c)*",)),
    None,
    Guided("json_schema", ('{"type": "array", "items": {"type": "integer"}}',)),
    None,
    Guided("choice", ("yes", "no", "yes, and then some")),
]
NGRAM = SpeculationSettings("ngram", 4, 24, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("guided") / "model"
    make_checkpoint(folder, arch="qwen3", size="tiny", seed=1)
    return folder


class GuidedPair(LoopPair):
    """writer: PE whose worker computes the prompts. steps: guided ones that the decode worker launched."""

    def __init__(self, folder: Path, *, captured: bool, writer: int, speculation: SpeculationSettings) -> None:
        super().__init__(folder, num_pages=120, speculation=speculation, kernels=TableKernels)
        self._grammars = Grammars(folder, VOCAB, (EOS,))
        self._writer = writer
        self.steps: list[Step] = []
        runner = self.runners[DECODE]
        if captured:
            runner.capture_steps(8, RunInOnePlace())
            runner.capture_prompts(128, RunInOnePlace())
            runner.capture_steps_with_prompts(RunInOnePlace())
        if captured and speculation.tokens:
            runner.capture_verification(speculation.max_step_tokens, RunInOnePlace(), speculation.max_ngram)
        if captured and speculation.draft:
            runner.capture_drafts(8, speculation.tokens, RunInOnePlace())
        engine = self.loops[DECODE].engine
        launch = engine.launch

        def noted(step: Step) -> Launched:
            launched = launch(step)
            if step.rows is not None and step.rows.sampling.is_guided:
                self.steps.append(step)
            return launched

        cast(Any, engine).launch = noted

    def begin(self, name: str, number: int, constraint: Constraint | None = None) -> None:
        prompt = random_prompt(5 + 3 * number, number) * 2
        guided = GUIDES[number % len(GUIDES)]
        params = SamplingParams(max_tokens=OUTPUT, temperature=number % 2 * 0.5, seed=number, guided=guided)
        reservation = self.decode.prepare(name, spec_of(prompt), OUTPUT, self._writer)
        if guided is not None and constraint is None:
            constraint = self._grammars.constraint(guided)
        if self._writer == PREFILL:
            first = None if guided is None else self._grammars.constraint(guided)
            self.prefill.submit(name, spec_of(prompt), params, reservation, first)
        stream = self._streams[name] = TokenStream()
        self.decode.start(name, reservation.reservation_id, params, stream, 0, constraint)
        self.run_prefill()

    def all_tokens(self) -> dict[str, list[int]]:
        """Requests come while others are decoded."""
        draws = random.Random(3)
        for number in range(10):
            self.begin(f"r{number}", number)
            for _ in range(draws.randint(0, 5)):
                self.step_decode()
        self.finish_all()
        self._grammars.close()
        return {name: self.tokens(name) for name in self._streams}

    def finish_all(self) -> None:
        for _ in range(5000):
            if all(self.ended(name) for name in self._streams):
                return
            self.step_decode()
        raise AssertionError("the decode loop does not come to an end")


@pytest.mark.gate("plain-0", "drafts-1")
@pytest.mark.parametrize("writer", [PREFILL, DECODE])
@pytest.mark.parametrize("speculation", [NO_SPECULATION, NGRAM], ids=["plain", "drafts"])
def test_tokens_in_graphs_are_those_of_eager_steps(folder: Path, writer: int, speculation: SpeculationSettings) -> None:
    eager = GuidedPair(folder, captured=False, writer=writer, speculation=NO_SPECULATION)
    ours = GuidedPair(folder, captured=True, writer=writer, speculation=speculation)
    tokens = ours.all_tokens()
    assert tokens == eager.all_tokens()
    assert all(tokens.values())
    ours.assert_free()


@pytest.mark.gate("in graphs")
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "in graphs"])
def test_a_head_drafts_beside_guided_rows_and_changes_no_token(tmp_path: Path, captured: bool) -> None:
    """Its layer takes the tokens of a step, which guided rows get after the launch."""
    model = make_llama(tmp_path / "model")
    head = SpeculationSettings("eagle3", 3, 24, draft=str(make_head(tmp_path / "head", model)))
    plain = GuidedPair(model, captured=False, writer=PREFILL, speculation=NO_SPECULATION)
    ours = GuidedPair(model, captured=captured, writer=PREFILL, speculation=head)
    tokens = ours.all_tokens()
    assert tokens == plain.all_tokens()
    assert any(step.drafts is not None for step in ours.steps)
    ours.assert_free()


@pytest.mark.parametrize("writer", [PREFILL, DECODE])
@pytest.mark.parametrize("speculation", [NO_SPECULATION, NGRAM], ids=["plain", "drafts"])
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "in graphs"])
def test_a_guided_step_is_launched_before_its_masks_are_waited_for(
    folder: Path, captured: bool, speculation: SpeculationSettings, writer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a slow grammar is computed during the forward, and not before it."""
    pair = GuidedPair(folder, captured=captured, writer=writer, speculation=speculation)
    launched: list[int] = []  # steps, before each wait

    def waited(constraints: Iterable[Constraint | None]) -> Any:
        launched.append(len(pair.steps))
        return masks_of(constraints)

    monkeypatch.setattr("tandem.workers.decode.guide_masks.masks_of", waited)
    pair.all_tokens()
    assert launched == list(range(1, len(pair.steps) + 1))
    assert any(step.drafts is not None for step in pair.steps) == bool(speculation.tokens)
    assert any(step.chunks is not None for step in pair.steps) == (writer == DECODE)


def test_guided_steps_of_the_same_rows_have_one_batch(folder: Path) -> None:
    """What a batch knows of its rows is computed once, and a record has it once."""
    pair = GuidedPair(folder, captured=False, writer=PREFILL, speculation=NO_SPECULATION)
    pair.all_tokens()
    steps = [step.rows for step in pair.steps if step.rows is not None]
    alike = [(one, other) for one, other in pairwise(steps) if one.sequence_ids == other.sequence_ids]
    assert len(alike) > 20
    assert all(one.sampling is other.sampling for one, other in alike)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "in graphs"])
def test_a_mask_that_fails_ends_its_request_alone(
    folder: Path, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = GuidedPair(folder, captured=captured, writer=PREFILL, speculation=NO_SPECULATION)
    guided = GUIDES[2]
    assert guided is not None
    constraint, masks = pair._grammars.constraint(guided), 0
    own = constraint._next_mask

    def failing(tokens: list[int]) -> Any:
        nonlocal masks
        masks += 1
        if masks == 5:
            raise RuntimeError("no mask")
        return own(tokens)

    monkeypatch.setattr(constraint, "_next_mask", failing)
    pair.begin("plain", 1)
    pair.begin("fails", 2, constraint)
    pair.begin("holds", 7)
    pair.finish_all()
    error = pair.ended("fails")
    assert isinstance(error, ForwardFailed)
    assert str(error) == "a mask could not be computed: no mask"
    assert len(pair.tokens("fails")) == 4
    expected = GuidedPair(folder, captured=False, writer=PREFILL, speculation=NO_SPECULATION)
    for name, number in (("plain", 1), ("holds", 7)):
        expected.begin(name, number)
    expected.finish_all()
    assert all(pair.tokens(name) == expected.tokens(name) for name in ("plain", "holds"))
    pair.assert_free()
