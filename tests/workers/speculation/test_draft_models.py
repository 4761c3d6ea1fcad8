"""A small model drafts: tokens are as without drafts, whatever model drafts, and right drafts are accepted."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from tandem.cache.plan.arrays import Int64Array
from tandem.transfer.errors import InvalidPositionMap
from tandem.workers.config import SpeculationSettings
from tandem.workers.engine.engine import Engine
from tandem.workers.models.blocks.cached_attention import CachedAttention
from tandem.workers.runner.next_drafts import NextDrafts
from tandem.workers.sampling.sampling_params import SamplingParams
from tandem.workers.speculation.draft_policy import DraftPolicy
from tandem.workers.speculation.drafter import DraftAsk, Drafter
from tandem.workers.speculation.model_drafter import ModelDrafter
from tests.cache.table_kernels import TableKernels
from tests.support.checkpoints import save_checkpoint
from tests.support.oracle import greedy, load_oracle, random_prompt
from tests.support.prompt_programs import RunInOnePlace
from tests.support.prompt_specs import spec_of
from tests.workers.loop_pair import LoopPair

Compute = Callable[[Tensor, CachedAttention], Tensor]
NUM_TOKENS, LENGTH = 28, 4
PAIRS = {  # case of the target, and of the drafter
    "itself": ("llama", "llama"),
    "another": ("llama", "gemma4"),
    "windows": ("gemma4", "gpt_oss"),
    "latents": ("deepseek_v3", "llama"),
    "chunks": ("llama4", "mistral"),
}
SAMPLED = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8, top_p=0.9, seed=7, ignore_eos=True)


def drafted_pair(
    target: Path, draft: Path, drafter: Callable[[Engine], Drafter | None] | None = None, **options: Any
) -> LoopPair:
    speculation = SpeculationSettings("draft_model", LENGTH, 32, draft=str(draft))
    return LoopPair(target, num_pages=64, speculation=speculation, drafter=drafter, **options)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def checkpoint(case: str) -> Path:
        if case not in made:
            made[case] = save_checkpoint(case, tmp_path_factory.mktemp(case))
        return made[case]

    return checkpoint


@pytest.mark.parametrize("pair", PAIRS)
def test_tokens_equal_transformers(checkpoints: Callable[[str], Path], pair: str) -> None:
    target, draft = map(checkpoints, PAIRS[pair])
    loops = drafted_pair(target, draft)
    oracle = load_oracle(target)
    for index, length in enumerate((3, 24, 45)):  # one chunk, ends of pages, several chunks
        prompt = random_prompt(length, seed=length)
        assert loops.complete(str(index), prompt, NUM_TOKENS) == greedy(oracle, prompt, NUM_TOKENS)
    counters = loops.decode_counters
    assert counters.drafted_tokens
    if pair == "itself":
        assert counters.accepted_tokens == counters.drafted_tokens >= 3 * 21
    loops.assert_free()


def test_sampled_tokens_are_those_without(checkpoints: Callable[[str], Path]) -> None:
    target = checkpoints("llama")
    plain, own = LoopPair(target), drafted_pair(target, target)
    other = drafted_pair(target, checkpoints("qwen3"))
    prompt = random_prompt(19, seed=3)
    plain_tokens, own_tokens, other_tokens = (
        loops.finish("a", prompt, loops.prepare("a", prompt, NUM_TOKENS), params=SAMPLED)
        for loops in (plain, own, other)
    )
    assert own_tokens == other_tokens == plain_tokens
    counters = own.decode_counters
    assert counters.accepted_tokens == counters.drafted_tokens > 0, "a drafter with the same logits is always right"


def test_a_prefix_brings_the_drafters_kv(checkpoints: Callable[[str], Path]) -> None:
    target = checkpoints("llama")
    loops = drafted_pair(target, target, sharing=True)
    prompt = random_prompt(30, seed=8)
    tokens = loops.complete("first", prompt, NUM_TOKENS)
    longer = [*prompt, *tokens[:20], 5]
    reservation = loops.prepare("second", longer, NUM_TOKENS)
    assert reservation.matched_tokens > 30, "the receiver has a prefix"
    assert loops.finish("second", longer, reservation, NUM_TOKENS) == greedy(load_oracle(target), longer, NUM_TOKENS)
    counters = loops.decode_counters
    assert counters.accepted_tokens == counters.drafted_tokens > 30


class FailsInTheMiddle:
    """Fails in the second step of its third draft, before it has grown the sequences or after that."""

    computes = True

    def __init__(self, engine: Engine, *, grown: bool) -> None:
        self._grown = grown
        self._inner = ModelDrafter(engine)
        self._engine = engine
        self._drafts = 0
        self._steps = 0  # of the third draft

    def propose(self, asks: Sequence[DraftAsk]) -> list[Int64Array]:
        self._drafts += 1
        if self._drafts < 3:
            return self._inner.propose(asks)
        drafts = self._engine._runner.drafts
        assert drafts is not None
        owner, name = (drafts._steps, "forward") if self._grown else (drafts._cache, "begin")
        with patch.object(owner, name, partial(self._fail, getattr(owner, name))):
            return self._inner.propose(asks)

    def _fail(self, call: Callable[..., Any], *args: Any) -> Any:
        self._steps += 1
        if self._steps == 2:
            raise RuntimeError("no draft")
        return call(*args)

    def forget(self, sequence_id: int) -> None:
        pass


@pytest.mark.parametrize("grown", [True, False])
def test_a_drafter_that_fails_leaves_and_takes_no_position(
    checkpoints: Callable[[str], Path], grown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DraftPolicy, "_is_hopeless", lambda *_: False)
    target = checkpoints("llama")
    made: list[FailsInTheMiddle] = []

    def failing(engine: Engine) -> Drafter:
        made.append(FailsInTheMiddle(engine, grown=grown))
        return made[-1]

    loops = drafted_pair(target, checkpoints("qwen3"), failing)
    prompt = random_prompt(11, seed=2)
    assert loops.complete("a", prompt, NUM_TOKENS) == greedy(load_oracle(target), prompt, NUM_TOKENS)
    assert 0 < loops.decode_counters.drafted_tokens <= 2 * LENGTH
    assert max(drafter._steps for drafter in made) == 2
    loops.assert_free()


def test_a_drafter_that_fails_behind_a_step_that_is_not_read_leaves(
    checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, put, calls = checkpoints("llama"), NextDrafts.put, 0

    def failing(self: NextDrafts, *args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:  # in the second chain
            raise RuntimeError("no draft")
        put(self, *args)

    loops = drafted_pair(target, checkpoints("llama"), kernels=TableKernels)
    for runner in loops.runners:
        runner.capture_steps(8, RunInOnePlace())
        runner.capture_verification(32, RunInOnePlace())
        runner.capture_drafts(8, 4, RunInOnePlace())
    monkeypatch.setattr(NextDrafts, "put", failing)
    prompt = random_prompt(11, seed=2)
    assert loops.complete("a", prompt, NUM_TOKENS) == greedy(load_oracle(target), prompt, NUM_TOKENS)
    assert calls == 5
    assert 0 < loops.decode_counters.drafted_tokens < NUM_TOKENS // 2
    loops.assert_free()


@pytest.mark.parametrize("case", ["llama", "deepseek_v2"])
def test_in_graphs_as_on_a_gpu(checkpoints: Callable[[str], Path], case: str) -> None:
    """Several rows, whose drafts have unlike lengths; what would be a graph is run anew."""
    target = checkpoints("llama")
    loops = drafted_pair(target, checkpoints(case), kernels=TableKernels)
    for runner in loops.runners:
        runner.capture_steps(8, RunInOnePlace())
        runner.capture_prompts(32, RunInOnePlace())
        runner.capture_verification(32, RunInOnePlace())
        runner.capture_drafts(8, 4, RunInOnePlace())
    assert loops.runners[1].overlaps == (case == "llama"), "latents have no graphs on a CPU"
    oracle = load_oracle(target)
    prompts = {str(length): random_prompt(length, seed=length) for length in (3, 17, 29)}
    lengths = {name: NUM_TOKENS - 7 * index for index, name in enumerate(prompts)}
    first = {}
    for name, prompt in prompts.items():
        reservation = loops.prepare(name, prompt, lengths[name])
        first[name] = loops.prefill.submit(name, spec_of(prompt), loops.params(lengths[name]), reservation)
        loops.start(name, reservation, lengths[name])
    loops.run_prefill()
    loops.run_decode()
    for name, prompt in prompts.items():
        tokens = [first[name].result(0).first_token, *loops.tokens(name)]
        assert tokens == greedy(oracle, prompt, lengths[name])
    counters = loops.decode_counters
    assert counters.drafted_tokens
    if case == "llama":
        assert counters.accepted_tokens == counters.drafted_tokens > 30
    loops.assert_free()


def test_a_side_without_the_drafter_is_refused(checkpoints: Callable[[str], Path]) -> None:
    target = checkpoints("llama")
    with_drafter, without = drafted_pair(target, target), LoopPair(target)
    reservation = with_drafter.prepare("a", [1, 2, 3])
    with pytest.raises(InvalidPositionMap, match="layout"):
        without.prefill.submit("a", spec_of([1, 2, 3]), without.params(4), reservation)
