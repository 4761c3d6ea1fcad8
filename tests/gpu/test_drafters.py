"""Drafters that are models or heads in CUDA graphs, against the eager path on the same GPU."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from tandem.cache.plan.arrays import Int64Array
from tandem.cache.plan.kv_scales import KVScales
from tandem.cache.plan.pool_sizes import SnapshotRule
from tandem.workers.config import SpeculationSettings
from tandem.workers.models.drafters.drafter_config import load_drafter_config
from tandem.workers.models.drafters.load import load_drafter
from tandem.workers.models.registry import load_config
from tandem.workers.models.weights import load_decoder
from tandem.workers.runner.model_cache import kv_layout, make_cache
from tandem.workers.runner.model_runner import ModelRunner
from tandem.workers.sampling.pending_samples import PendingSamples
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.sampling.sampling_params import SamplingParams
from tandem.workers.speculation.speculation import drafts_of
from tests.support.checkpoints import make_model, sizes_on_gpu
from tests.support.draft_heads import save_eagle3, save_mtp
from tests.support.oracle import random_prompt
from tests.support.tvm_cache import TvmCache
from tests.support.whole_prompts import compute_prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]
PROMPTS = {sequence: random_prompt(9 + 20 * sequence, seed=sequence) for sequence in range(5)}
LENGTHS = ((1, 4, 2, 3, 4), (4, 1, 3, 2, 1), (2, 2, 4, 4, 3))  # of each sequence's draft, step after step
NUM_STEPS = 9
MOSTLY = 0.9  # of tokens; near-equals swap where kernels differ
Drafted = list[list[Int64Array]]
SAMPLING = SampleBatch.from_params([SamplingParams(temperature=0)] * len(PROMPTS))


def with_itself(folder: Path) -> SpeculationSettings:
    make_model("qwen3", **sizes_on_gpu("qwen3")).save_pretrained(folder / "target")
    return SpeculationSettings("draft_model", 4, 32, draft=str(folder / "target"))


def beside_states(folder: Path) -> SpeculationSettings:
    make_model("qwen3_next", **sizes_on_gpu("qwen3_next")).save_pretrained(folder / "target")
    make_model("qwen3", **sizes_on_gpu("qwen3")).save_pretrained(folder / "drafter")
    return SpeculationSettings("draft_model", 4, 32, draft=str(folder / "drafter"))


def with_mtp(folder: Path) -> SpeculationSettings:
    save_mtp(folder / "target", "deepseek_v3", **sizes_on_gpu("deepseek_v3"))
    return SpeculationSettings("mtp", 4, 32)


def with_mtp_of_glm(folder: Path) -> SpeculationSettings:
    save_mtp(folder / "target", "glm4_moe", **sizes_on_gpu("glm4_moe"))
    return SpeculationSettings("mtp", 4, 32)


def with_mtp_beside_states(folder: Path) -> SpeculationSettings:
    save_mtp(folder / "target", "qwen3_next", **sizes_on_gpu("qwen3_next"))
    return SpeculationSettings("mtp", 4, 32)


def with_eagle3(folder: Path) -> SpeculationSettings:
    make_model("llama", num_hidden_layers=8, **sizes_on_gpu("llama")).save_pretrained(folder / "target")
    save_eagle3(folder / "head", whole_vocab=True, hidden=256, head_dim=64)
    return SpeculationSettings("eagle3", 4, 32, draft=str(folder / "head"))


KINDS: dict[str, Callable[[Path], SpeculationSettings]] = {
    "draft_model": with_itself,
    "draft_model beside states": beside_states,
    "mtp": with_mtp,
    "mtp in 8 bits": with_mtp,
    "mtp of GLM-4-MoE": with_mtp_of_glm,
    "mtp beside states": with_mtp_beside_states,
    "eagle3": with_eagle3,
}


class Made(NamedTuple):
    """By step and sequence the drafts, and the target's token at each drafted position and after them."""

    drafts: Drafted
    tokens: Drafted


class Drafting:
    """A runner with prompts stored."""

    def __init__(
        self,
        folder: Path,
        speculation: SpeculationSettings,
        *,
        graphs: bool,
        fp8: bool = False,
        device: str = "cuda",
    ) -> None:
        config = load_config(folder / "target", "bfloat16")
        drafter = load_drafter_config(speculation, config)
        assert drafter is not None
        scales = KVScales.uniform(config.num_layers + drafter.num_layers) if fp8 else None
        layout = kv_layout(config, 16, scales, drafter)
        pools = [
            torch.full((200, *layout.page_shape(group)), torch.nan, dtype=layout.stored_dtype_of(group), device=device)
            for group in range(len(layout.groups))
        ]
        rule = SnapshotRule(16, 0, len(PROMPTS))  # pages for states before drafts
        self.cache = TvmCache.of(
            make_cache(config, layout, pools, max_sequences=8, max_length=256, drafter=drafter, snapshots=rule)
        )
        target = load_decoder(folder / "target", config, device=torch.device(device))
        self.runner = ModelRunner(load_drafter(folder / "target", speculation, target, drafter), self.cache)
        if graphs:
            self.runner.capture_steps(8)
            self.runner.capture_verification(32)
            self.runner.capture_drafts(8, 4)
        self.last: dict[int, int] = {}
        for sequence, prompt in PROMPTS.items():
            self.cache.add_sequence(sequence)
            logits = compute_prompts(self.runner, [sequence], [np.array(prompt)], [len(prompt)], push=False)
            self.last[sequence] = int(logits.argmax())

    def run(self, given: Made | None = None) -> Made:
        """given: of another run, whose tokens and drafts are taken in place of the own ones."""
        made = Made([], [])
        for step in range(NUM_STEPS):
            drafts, pending = self._launch(step, None if given is None else given.drafts[step])
            made.drafts.append(drafts)
            drafts = drafts if given is None else given.drafts[step]
            made.tokens.append(tokens_of(pending, drafts))
            self._take(drafts, made.tokens[-1] if given is None else given.tokens[step])
        return made

    def run_ahead(self) -> Made:
        """Each step but the first is launched before the one before it is read."""
        made = Made([], [])
        drafts, pending = self._launch(0, None)
        for step in range(NUM_STEPS):
            following = self._follow(step + 1, drafts) if step + 1 < NUM_STEPS else None
            made.drafts.append(drafts)
            made.tokens.append(tokens_of(pending, drafts))
            self._take(drafts, made.tokens[-1])
            if following is not None:
                drafting, pending = following
                drafts = drafts_of(drafting.wait().token_ids, LENGTHS[(step + 1) % len(LENGTHS)])
        return made

    def _launch(self, step: int, drafts: list[Int64Array] | None) -> tuple[list[Int64Array], PendingSamples]:
        """Launches drafting, and a verify step of `drafts`; None: of the drafts just made."""
        counts = np.array(LENGTHS[step % len(LENGTHS)])
        positions = np.array([self.cache.num_tokens(sequence) + 1 for sequence in PROMPTS])
        last = np.array([self.last[sequence] for sequence in PROMPTS])
        assert self.runner.drafts is not None
        drafted = self.runner.drafts.draft(list(PROMPTS), last, counts, SAMPLING, positions)
        tokens = [
            np.concatenate(([token], draft))
            for token, draft in zip(last, drafted if drafts is None else drafts, strict=True)
        ]
        return drafted, self.runner.verify(list(PROMPTS), tokens, SAMPLING, positions)

    def _follow(self, step: int, before: list[Int64Array]) -> tuple[PendingSamples, PendingSamples]:
        """Drafts, and a verify step of them, after one of the drafts `before` that is not read."""
        counts = np.array(LENGTHS[step % len(LENGTHS)])
        assert self.runner.drafts is not None
        drafting = self.runner.drafts.draft_behind(list(PROMPTS), counts, SAMPLING)
        assert drafting is not None
        positions = np.array([self.cache.num_tokens(sequence) + 1 for sequence in PROMPTS])
        tokens = [np.zeros(count + 1, np.int64) for count in counts]
        return drafting, self.runner.verify(list(PROMPTS), tokens, SAMPLING, positions, follows=True)

    def _take(self, drafts: list[Int64Array], followed: list[Int64Array]) -> None:
        """Takes the accepted drafts of a step, given the tokens that followed them."""
        surplus = {}
        for sequence, draft, its in zip(PROMPTS, drafts, followed, strict=True):
            held = int(np.cumprod(draft == its[:-1]).sum())
            self.last[sequence] = int(its[held])
            surplus[sequence] = draft.size - held
        self.cache.pop_each(list(surplus), list(surplus.values()))


def tokens_of(pending: PendingSamples, drafts: list[Int64Array]) -> list[Int64Array]:
    """Splits the tokens of a verify step by sequence."""
    return np.split(pending.wait().token_ids, np.cumsum([one.size + 1 for one in drafts])[:-1])


def flat(arrays: Drafted) -> Int64Array:
    return np.concatenate([one for step in arrays for one in step])


# FlashInfer plans attention over latents for the lengths themselves: no step of theirs follows one that is not read.
# Over latents in 8 bits Triton attends. States are taken back on the host's word.
AHEAD = [kind for kind in KINDS if kind != "mtp" and not kind.endswith("beside states")]
CASES = [(kind, False) for kind in KINDS] + [(kind, True) for kind in AHEAD]


@pytest.mark.parametrize(
    ("kind", "ahead"), CASES, ids=[f"{kind}-{'ahead' if own else 'each read first'}" for kind, own in CASES]
)
def test_graphs_draft_as_the_eager_path(kind: str, ahead: bool, tmp_path: Path) -> None:
    speculation = KINDS[kind](tmp_path)
    fp8 = kind.endswith("in 8 bits")
    graphs, eager = (Drafting(tmp_path, speculation, graphs=graphs, fp8=fp8) for graphs in (True, False))
    assert graphs.runner.overlaps
    last = dict(graphs.last)
    eager.last = last
    ours = graphs.run_ahead() if ahead else graphs.run()
    theirs = eager.run(ours)
    assert flat(ours.drafts).size >= (NUM_STEPS - 1) * 12
    assert (flat(ours.drafts) == flat(theirs.drafts)).mean() >= MOSTLY
    assert (flat(ours.tokens) == flat(theirs.tokens)).mean() >= MOSTLY
    if kind == "draft_model":
        right = [draft == its[:-1] for step in zip(*ours, strict=True) for draft, its in zip(*step, strict=True)]
        assert np.concatenate(right).mean() >= MOSTLY, "a drafter with the target's weights is right"
