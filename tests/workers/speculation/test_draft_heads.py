"""Heads draft what naive versions of them draft, after every step, and change no token."""

import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from tandem.cache.plan.arrays import Int64Array
from tandem.cache.plan.pool_sizes import SnapshotRule
from tandem.workers.config import SpeculationSettings
from tandem.workers.engine.engine import Engine
from tandem.workers.models.drafters.head import HeadedDecoder
from tandem.workers.models.drafters.mtp import MtpHead, MtpNames, load_mtp, mtp_config
from tandem.workers.models.registry import load_config
from tandem.workers.models.weights import load_decoder
from tandem.workers.speculation.draft_length import DraftLength
from tandem.workers.speculation.draft_policy import DraftPolicy
from tandem.workers.speculation.drafter import DraftAsk
from tandem.workers.speculation.model_drafter import ModelDrafter
from tandem.workers.speculation.speculation import Speculation
from tandem.workers.speculation.verification import Verification
from tests.cache.table_kernels import TableKernels
from tests.support.checkpoints import make_model
from tests.support.draft_heads import save_eagle3, save_mtp
from tests.support.oracle import greedy, load_oracle, random_prompt
from tests.support.prompt_programs import RunInOnePlace
from tests.support.prompt_specs import spec_of
from tests.workers.loop_pair import DECODE, LoopPair
from tests.workers.reference_attention import ReferenceAttention
from tests.workers.reference_attention import Sequence as CachedSequence

if TYPE_CHECKING:
    from transformers.generation.candidate_generator import MTPCandidateGenerator
    from transformers.modeling_layers import MtpModel

LENGTH, NUM_TOKENS = 3, 16
CPU = torch.device("cpu")
Naive = Callable[[Sequence[int], int], list[int]]
"""The tokens, so many, that a naive head drafts after a context."""


@torch.inference_mode()
def draft_mtp(model: Any, mtp: "MtpModel", context: Sequence[int], count: int) -> list[int]:
    """The layer over all of the context at once, then over it and its own drafts."""
    ids = torch.tensor([context])
    hidden = model.model(ids[:, :-1]).last_hidden_state
    drafts: list[int] = []
    for _ in range(count):
        following = torch.tensor([[*context[1:], *drafts]])
        positions = torch.arange(following.shape[1])[None]
        out: Any = mtp.forward_layer(0, hidden, positions, None, input_ids=following)
        drafts.append(int(model.lm_head(out[0, -1]).argmax()))
        hidden = torch.cat((hidden, out[:, -1:]), 1)
    return drafts


@torch.inference_mode()
def draft_eagle3(model: Any, tensors: dict[str, Tensor], context: Sequence[int], count: int) -> list[int]:
    """Drafts as in the paper, over all of the context at once, then over it and its own drafts."""
    ids = torch.tensor([context])
    states = model(ids[:, :-1], output_hidden_states=True).hidden_states
    low, middle, high = 2, len(model.model.layers) // 2, len(model.model.layers) - 3
    hidden = torch.cat((states[low], states[middle], states[high]), 2)[0] @ tensors["fc.weight"].T
    embedding: Any = tensors.get("embed_tokens.weight", model.model.embed_tokens.weight)
    drafts: list[int] = []
    for _ in range(count):
        following = torch.tensor([*context[1:], *drafts])
        out = eagle3_layer(tensors, hidden, embedding[following])
        choice = int((norm(out[-1:], tensors["norm.weight"]) @ tensors["lm_head.weight"].T).argmax())
        drafts.append(choice + (int(tensors["d2t"][choice]) if "d2t" in tensors else 0))
        hidden = torch.cat((hidden, out[-1:]))
    return drafts


def eagle3_layer(tensors: dict[str, Tensor], hidden: Tensor, embedded: Tensor) -> Tensor:
    """out [T, H] of hidden and embedded [T, H]."""
    of = {name.removeprefix("midlayer.").removesuffix(".weight"): tensor for name, tensor in tensors.items()}
    x = torch.cat((norm(embedded, of["input_layernorm"]), norm(hidden, of["hidden_norm"])), 1)
    count = x.shape[0]
    q, k, v = ((x @ of[f"self_attn.{name}_proj"].T).view(count, -1, 16).transpose(0, 1) for name in "qkv")
    angles = torch.arange(count)[:, None] / 3000.0 ** (torch.arange(0, 16, 2) / 16)
    cos, sin = (torch.cat((half, half), 1) for half in (angles.cos(), angles.sin()))
    q, k = (one * cos + torch.cat((-one[..., 8:], one[..., :8]), -1) * sin for one in (q, k))
    attended = F.scaled_dot_product_attention(q, k.repeat_interleave(2, 0), v.repeat_interleave(2, 0), is_causal=True)
    hidden = hidden + attended.transpose(0, 1).flatten(1) @ of["self_attn.o_proj"].T
    x = norm(hidden, of["post_attention_layernorm"])
    return hidden + (F.silu(x @ of["mlp.gate_proj"].T) * (x @ of["mlp.up_proj"].T)) @ of["mlp.down_proj"].T


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


class Watched(ModelDrafter):
    """Notes what the head drafts, and hands on, at random, that or what the target will say."""

    def __init__(self, engine: Engine, due: dict[tuple[int, ...], list[int]]) -> None:
        """due: outputs by prompts."""
        super().__init__(engine)
        self._due = due
        self._draws = random.Random(3)
        self.drafted: dict[tuple[int, ...], list[int]] = {}  # by context

    def propose(self, asks: Sequence[DraftAsk]) -> list[Int64Array]:
        drafts = super().propose(asks)
        for ask, draft in zip(asks, drafts, strict=True):
            if draft.size:
                self.drafted[tuple(ask.context.tolist())] = draft.tolist()
        return [self._handed_on(ask, draft) for ask, draft in zip(asks, drafts, strict=True)]

    def _handed_on(self, ask: DraftAsk, draft: Int64Array) -> Int64Array:
        context = ask.context.tolist()
        for prompt, output in self._due.items():
            whole = [*prompt, *output]
            if whole[: len(context)] == context and self._draws.random() < 0.5:
                right = whole[len(context) : len(context) + self._draws.randrange(1, ask.most + 1)]
                return np.array([*right, 3][: ask.most])
        return draft


STATELESS = ["deepseek_v3", "glm4_moe"]


@pytest.fixture(scope="module", params=[*STATELESS, "qwen3_next", "qwen3_5", "qwen3_5_moe"])
def mtp_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mtp(tmp_path_factory.mktemp("mtp"), request.param)


@pytest.fixture
def with_mtp(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers reads such a model's third layer, after two, and not after as many as published models have."""
    from transformers import DeepseekV3ForCausalLM, Glm4MoeForCausalLM

    for oracle in (DeepseekV3ForCausalLM, Glm4MoeForCausalLM):
        monkeypatch.setattr(oracle, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.2\..*"])


@pytest.fixture
def always_drafting() -> Iterator[None]:
    with (
        mock.patch.object(DraftLength, "next", lambda self, num_output, best: best[100]),
        mock.patch.object(DraftPolicy, "_is_hopeless", return_value=False),
    ):
        yield


def check(
    target: Path, speculation: SpeculationSettings, naive: Naive, *, in_graphs: bool = False, follows: bool = False
) -> None:
    """Several rows at once: tokens, and each draft. follows: verify steps are launched before those before are read."""
    oracle = load_oracle(target)
    prompts = [random_prompt(length, seed=length) for length in (3, 9, 16)]  # a chunk each
    due = {tuple(prompt): greedy(oracle, prompt, NUM_TOKENS) for prompt in prompts}
    watched: list[Watched] = []

    def make(engine: Engine) -> Watched:
        watched.append(Watched(engine, due))
        return watched[-1]

    replays = 0

    def counted(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        compute()

        def replay() -> Tensor:
            nonlocal replays
            replays += 1
            return compute()

        return replay

    recall, chained = Speculation.recall, {}

    def recalled(self: Speculation, step: Verification) -> None:
        recall(self, step)
        for request, draft in zip(step.requests, step.drafts or [], strict=True):
            if step.drafting is not None and draft.size and not request.ended:
                chained[*request.prompt.token_ids.tolist(), *request.output] = draft.tolist()

    options: dict[str, Any] = {"kernels": TableKernels} if in_graphs else {}
    if load_config(target).recurrent is not None:
        options["snapshots"] = SnapshotRule(16, 8, len(prompts))
    loops = LoopPair(target, num_pages=64, speculation=speculation, drafter=make, **options)
    for runner in loops.runners if in_graphs else ():
        runner.capture_steps(8, RunInOnePlace())
        runner.capture_prompts(32, RunInOnePlace())
        runner.capture_verification(32, RunInOnePlace())
        runner.capture_drafts(8, LENGTH, counted)
        assert runner.overlaps
        if not follows:
            runner.next_drafts = None
    first = {}
    for index, prompt in enumerate(prompts):
        reservation = loops.prepare(str(index), prompt, NUM_TOKENS)
        first[index] = loops.prefill.submit(str(index), spec_of(prompt), loops.params(NUM_TOKENS), reservation)
        loops.start(str(index), reservation, NUM_TOKENS)
        loops.run_prefill()
    with mock.patch.object(Speculation, "recall", recalled):
        loops.run_decode()
    for index, prompt in enumerate(prompts):
        assert [first[index].result(0).first_token, *loops.tokens(str(index))] == due[tuple(prompt)]
    assert loops.decode_counters.accepted_tokens > 8
    assert (replays > 4) == in_graphs
    drafted = watched[1].drafted
    assert (len(chained) > 12) == follows
    drafted |= chained
    assert len(drafted) > 12
    for context, draft in drafted.items():
        assert draft == naive(context, len(draft)), f"behind {len(context)} tokens"
    assert max(map(len, drafted.values())) == LENGTH
    loops.assert_free()


def load_mtp_oracle(folder: Path) -> tuple[Any, "MtpModel"]:
    """The model, and its layer for multi-token prediction, which transformers does not know of Qwen's."""
    from transformers.modeling_layers import MtpModel

    oracle: Any = load_oracle(folder)
    if load_config(folder).extra_root is not None:
        oracle.config.num_mtp_layers, oracle.config.mtp_layer_types = 1, ["full_attention"]
    return oracle, MtpModel.from_pretrained(oracle)


@pytest.mark.usefixtures("with_mtp")
@torch.inference_mode()
def test_the_logits_of_a_layer_are_those_of_transformers(mtp_folder: Path) -> None:
    oracle, mtp = load_mtp_oracle(mtp_folder)
    context, positions = torch.tensor([random_prompt(70, seed=2)]), torch.arange(69)[None]
    ids, following = context[:, :-1], context[:, 1:]
    hidden = oracle.model(ids).last_hidden_state
    expected: Any = mtp.forward_layer(0, hidden, positions, None, input_ids=following)
    config = load_config(mtp_folder)
    own = mtp_config(config)
    head = MtpHead(own, load_mtp(mtp_folder, own, config, CPU), load_decoder(mtp_folder, config))
    cached = ReferenceAttention(own)
    cached.batch = [(CachedSequence(69), 69)]
    given = head(head.enter(hidden[0]), following[0], cached)
    torch.testing.assert_close(head.logits(given), oracle.lm_head(expected[0]), rtol=1e-4, atol=1e-4)


def test_experts_of_a_layer_may_be_stored_as_one_tensor(tmp_path: Path) -> None:
    """The target's experts may be stored in another way."""
    folder = save_mtp(tmp_path / "one by one", "qwen3_5_moe")
    joined = shutil.copytree(folder, tmp_path / "joined")
    tensors, block = load_file(folder / "model.safetensors"), "mtp.layers.0.mlp.experts"

    def of_all(name: str) -> Tensor:
        return torch.stack([tensors.pop(f"{block}.{expert}.{name}.weight") for expert in range(8)])

    tensors[f"{block}.gate_up_proj"] = torch.cat((of_all("gate_proj"), of_all("up_proj")), 1)
    tensors[f"{block}.down_proj"] = of_all("down_proj")
    save_file(tensors, joined / "model.safetensors", {"format": "pt"})
    config = load_config(folder)
    own, names = mtp_config(config), MtpNames.of(config)
    one_by_one, at_once = (load_mtp(one, own, config, CPU).named(own, names) for one in (folder, joined))
    assert one_by_one.keys() == at_once.keys()
    assert all(torch.equal(tensor, at_once[name]) for name, tensor in one_by_one.items())


@pytest.mark.usefixtures("always_drafting", "with_mtp")
@pytest.mark.gate("deepseek_v3", "glm4_moe", "qwen3_next")
def test_mtp_drafts_what_its_layer_says(mtp_folder: Path) -> None:
    oracle, mtp = load_mtp_oracle(mtp_folder)
    check(mtp_folder, SpeculationSettings("mtp", LENGTH, 32), partial(draft_mtp, oracle, mtp))


@pytest.mark.usefixtures("with_mtp")
@pytest.mark.parametrize("mtp_folder", STATELESS, indirect=True)
def test_the_naive_layer_drafts_what_transformers_does(mtp_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.generation.candidate_generator import MTPCandidateGenerator

    (oracle, mtp), prompt = load_mtp_oracle(mtp_folder), random_prompt(9, seed=9)
    given, theirs = {}, MTPCandidateGenerator.get_candidates

    def noted(self: "MTPCandidateGenerator", input_ids: Any, *args: Any, **options: Any) -> Any:
        ids, logits = theirs(self, input_ids, *args, **options)
        given[tuple(input_ids[0].tolist())] = ids[0, input_ids.shape[1] :].tolist()
        return ids, logits

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", noted)
    ids = torch.tensor([prompt])
    out: Any = oracle.generate(ids, max_new_tokens=10, do_sample=False, use_mtp=True)  # type: ignore[operator]
    assert out[0, 9:].tolist() == greedy(oracle, prompt, 10)
    drafts = {context: draft for context, draft in given.items() if draft}
    assert len(drafts) > 5
    for context, draft in drafts.items():
        assert draft == draft_mtp(oracle, mtp, context, 1)


@pytest.mark.usefixtures("always_drafting")
@pytest.mark.gate("follows-some tokens", "in graphs-all tokens", "eager-some tokens")
@pytest.mark.parametrize("whole_vocab", [True, False], ids=["all tokens", "some tokens"])
@pytest.mark.parametrize(
    ("in_graphs", "follows"), [(True, True), (True, False), (False, False)], ids=["follows", "in graphs", "eager"]
)
def test_eagle3_drafts_what_its_head_says(tmp_path: Path, whole_vocab: bool, in_graphs: bool, follows: bool) -> None:
    target = tmp_path / "target"
    make_model("llama", num_hidden_layers=8).save_pretrained(target)
    tensors = save_eagle3(tmp_path / "head", whole_vocab=whole_vocab)
    naive = partial(draft_eagle3, load_oracle(target), tensors)
    speculation = SpeculationSettings("eagle3", LENGTH, 32, draft=str(tmp_path / "head"))
    check(target, speculation, naive, in_graphs=in_graphs, follows=follows)


@pytest.mark.usefixtures("always_drafting")
@pytest.mark.gate("qwen3_5")
@pytest.mark.parametrize("case", ["qwen3_5", "kimi_linear"])
def test_eagle3_drafts_beside_states(tmp_path: Path, case: str) -> None:
    """It takes the inputs of two layers with states, and of one that attends."""
    target, kinds = tmp_path / "target", ["linear_attention", "full_attention"] * 4
    make_model(case, num_hidden_layers=8, layer_types=kinds).save_pretrained(target)
    tensors = save_eagle3(tmp_path / "head", whole_vocab=False)
    speculation = SpeculationSettings("eagle3", LENGTH, 32, draft=str(tmp_path / "head"))
    check(target, speculation, partial(draft_eagle3, load_oracle(target), tensors))


def test_a_head_that_is_always_wrong_leaves_steps_to_the_target(tmp_path: Path) -> None:
    """Its KV has holes then; what is drafted after a prefix with such is wrong, too, and changes nothing."""
    target = tmp_path / "target"
    make_model("llama", num_hidden_layers=8).save_pretrained(target)
    save_eagle3(tmp_path / "head", whole_vocab=True)
    speculation = SpeculationSettings("eagle3", LENGTH, 32, draft=str(tmp_path / "head"))
    loops = LoopPair(target, num_pages=64, speculation=speculation, sharing=True, kernels=TableKernels)
    runner = loops.runners[DECODE]
    runner.capture_steps(8, RunInOnePlace())
    runner.capture_verification(32, RunInOnePlace())
    runner.capture_drafts(8, LENGTH, RunInOnePlace())
    stepped, steps = runner.step, list[tuple[bool, int]]()  # whether alone, and calls of the head until then
    headed, calls = HeadedDecoder.forward, 0

    def step(*arguments: Any, alone: bool) -> Any:
        steps.append((alone, calls))
        return stepped(*arguments, alone=alone)

    def counted(self: HeadedDecoder, *arguments: Any) -> Tensor:
        nonlocal calls
        calls += self is cast(Any, runner)._model
        return headed(self, *arguments)

    with mock.patch.object(runner, "step", step), mock.patch.object(HeadedDecoder, "forward", counted):
        prompt, oracle = random_prompt(9, seed=9), load_oracle(target)
        output = loops.complete("first", prompt, 80)
        assert output == greedy(oracle, prompt, 80)
        alone = [calls for is_alone, calls in steps if is_alone]
        assert len(alone) > 10
        assert min(alone) == max(alone), "the head takes no part"
        longer = [*prompt, *output, 5]
        reservation = loops.prepare("second", longer, 30)
        assert reservation.matched_tokens > 60
        assert loops.finish("second", longer, reservation, 30) == greedy(oracle, longer, 30)
    counters = loops.decode_counters
    assert 0 < counters.drafted_tokens < 40
