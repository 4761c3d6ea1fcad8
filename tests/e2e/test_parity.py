"""Tokens through the gRPC server equal transformers' greedy generation, for every family and config feature."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from tandem.transfer.factory import create_transport
from tandem.transfer.membership import TransportConfig
from tandem.transfer.transport import Transport
from tests.support.checkpoints import CASES, FAMILIES, KEEP_STATES, save_checkpoint
from tests.support.client_requests import GREEDY, complete, complete_all, tokens_of
from tests.support.drafters import SPECULATING, KnownDrafter, drafting
from tests.support.held_prefill import prefill_held
from tests.support.island import running_island
from tests.support.oracle import greedy_all, load_oracle, random_prompt

CHUNK, PAGE = 48, 8
# One token; around a page, around a chunk, several chunks.
LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5)
OUTPUT = PAGE + 1  # a page begins in every decode
# Cases of unlike caches: plain pages, latents, index keys, compressed KV, windows, windows with sinks, experts, states.
SEVERAL = (
    "llama",
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v4",
    "gemma3",
    "gpt_oss",
    "kimi_linear",
    "nemotron_h",
    "qwen3_moe",
    "qwen3_next",
)
# Whose steps do what those of another case do: projections and tables of RoPE are others.
LIKE_OTHERS = ("-bias", "-tied", "-eps", "-theta", "-linear", "-llama3", "-yarn", "-yarn-options", "-head-dim", "-mqa")
# Families whose layers are those of another: the gate compares their logits (tests/workers/models/test_decoder.py).
# Those of DeepSeek-V4 have clusters of their own (tests/e2e/test_deepseek_v4_cluster.py, test_ranks.py).
RELATED = (
    "deepseek_v2",
    "deepseek_v4",
    "gemma2",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "mistral",
    "mixtral",
    "phi3",
    "qwen2",
    "qwen3_5",
    "qwen3_5_moe",
    "seed_oss",
)
ISLANDS = [(case, each) for case in CASES for each in ((1, 2) if case in SEVERAL else (1,))]


@dataclass(frozen=True)
class Known:
    """A checkpoint with transformers' outputs: OUTPUT tokens after each prompt."""

    folder: Path
    prompts: list[list[int]]
    tokens: list[list[int]]


class RecordedPosts:
    """Makes an island's transports. pairs: (writer, receiver), PEs of which one told the other that KV has landed."""

    def __init__(self) -> None:
        self.pairs: set[tuple[int, int]] = set()

    def __call__(self, name: str, config: TransportConfig) -> Transport:
        transport = create_transport(name, config)
        post = transport.post

        def record(pe: int, *row: int) -> None:
            self.pairs.add((config.pe, pe))
            post(pe, *row)

        transport.post = record  # type: ignore[method-assign]
        return transport


@pytest.fixture(scope="module", params=CASES)
def known(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Known:
    folder = save_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    prompts = [random_prompt(length, seed) for seed, length in enumerate(LENGTHS * 2)]
    return Known(folder, prompts, greedy_all(load_oracle(folder), prompts, OUTPUT))


@pytest.mark.gate("llama-2P2D", *(f"{family}-1P1D" for family in FAMILIES if family not in RELATED))
@pytest.mark.parametrize(
    ("known", "each"),
    ISLANDS,
    indirect=["known"],
    scope="module",  # that of `known`, which is made once for several tests
    ids=[f"{case}-{each}P{each}D" for case, each in ISLANDS],
)
def test_alone_and_sixteen_at_once(known: Known, each: int) -> None:
    """Half of the prompts come alone, then all, and the island holds half of them already."""
    posts, alone = RecordedPosts(), len(LENGTHS)
    settings = {"island.num_prefill": each, "island.num_decode": each, "scheduler.max_batch_tokens": CHUNK}
    with running_island(known.folder, settings, posts) as island:
        for prompt, tokens in zip(known.prompts[:alone], known.tokens[:alone], strict=True):
            assert tokens_of(complete(island.address, prompt, max_tokens=OUTPUT, **GREEDY)) == tokens
        posts.pairs.clear()
        with prefill_held(island, len(known.prompts)):
            assert complete_all(island.address, known.prompts, max_tokens=OUTPUT, **GREEDY) == known.tokens
    assert {pe for pair in posts.pairs for pe in pair} == set(range(2 * each)), "every worker took part"


@pytest.mark.gate("llama", "deepseek_v3", "gemma3")
@pytest.mark.parametrize(
    "known",
    [case for case, (family, _) in CASES.items() if family not in KEEP_STATES and not case.endswith(LIKE_OTHERS)],
    indirect=True,
)
def test_with_drafts_right_and_wrong(known: Known) -> None:
    drafter = KnownDrafter(known.prompts, known.tokens, right=0.7)
    with (
        drafting(drafter),
        running_island(known.folder, {**SPECULATING, "scheduler.max_batch_tokens": CHUNK}) as island,
    ):
        assert complete_all(island.address, known.prompts, max_tokens=OUTPUT, **GREEDY) == known.tokens
        counters = island.workers[-1]._loop.counters  # type: ignore[union-attr]
        if island.workers[-1].model_config.rope.by_length:
            assert counters.drafted_tokens == 0, "K of a step depends on how long the sequence is then"
        else:
            assert 0 < counters.accepted_tokens < counters.drafted_tokens
            assert len(drafter.forgotten) == len(known.prompts)


@pytest.mark.gate("7")
@pytest.mark.parametrize("chunk", [1, 7, 16, 1000])
def test_split_at_any_position(chunk: int, tmp_path: Path) -> None:
    """Chunks of any size, page borders or not, give the tokens of one forward."""
    folder = save_checkpoint("llama", tmp_path)
    prompts = [random_prompt(length, seed) for seed, length in enumerate((1, 5, 16, 17, 40))]
    expected = greedy_all(load_oracle(folder), prompts, OUTPUT)
    with running_island(folder, {"scheduler.max_batch_tokens": chunk, "cache.page_size": 16}) as island:
        assert complete_all(island.address, prompts, max_tokens=OUTPUT, **GREEDY) == expected


def test_layers_with_a_window_have_fewer_pages(tmp_path: Path) -> None:
    """They have as many as three sequences' windows and one forward can use. Pages that leave a window are reused all
    the time."""
    folder = save_checkpoint("gemma3", tmp_path)
    prompts = [random_prompt(length, seed) for seed, length in enumerate((CHUNK + 5, 3 * CHUNK, 70, 9, 110, 40))]
    settings = {"scheduler.max_batch_tokens": 16, "scheduler.max_sequences": 3}
    with running_island(folder, settings) as island:
        assert {tuple(pool.shape[0] for pool in worker.pools) for worker in island.workers} == {(48, 256)}
        expected = greedy_all(load_oracle(folder), prompts, 35)
        assert complete_all(island.address, prompts, max_tokens=35, **GREEDY) == expected
