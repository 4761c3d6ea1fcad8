"""Log-probabilities of prompts, through the gRPC server: those of transformers, however a prompt is computed."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from tandem.cluster.client.client_messages import GenerateUpdate, TokenLogprobs
from tandem.cluster.errors import InvalidRequest
from tests.e2e.test_adaptive import CHOICES, adaptive_island, choosing, in_graphs
from tests.support.checkpoints import save_checkpoint
from tests.support.client_requests import GREEDY, complete, tokens_of
from tests.support.island import Island, running_island
from tests.support.oracle import greedy, load_oracle, random_prompt
from tests.support.waiting import until

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel

__all__ = ["in_graphs"]  # a fixture

PROMPTS = [random_prompt(length, seed=length) for length in (1, 2, 41, 90)]
NUM_TOP = 3
NUM_TOKENS = 5


@torch.inference_mode()
def values_of(oracle: "PreTrainedModel", prompt: Sequence[int], cache: "DynamicCache | None" = None) -> Tensor:
    return oracle(torch.tensor([list(prompt)]), past_key_values=cache).logits[0].log_softmax(-1)


def entries_of(updates: Sequence[GenerateUpdate]) -> list[TokenLogprobs | None]:
    """Returns all entries, and checks that none comes after a token."""
    first_token = next((number for number, update in enumerate(updates) if update.token_ids), len(updates))
    assert not any(update.prompt_logprobs for update in updates[first_token:])
    return [entry for update in updates for entry in update.prompt_logprobs]


def check(entries: Sequence[TokenLogprobs | None], prompt: Sequence[int], values: Tensor, num_top: int) -> None:
    assert len(entries) == len(prompt)
    assert entries[0] is None
    for entry, token, row in zip(entries[1:], prompt[1:], values, strict=False):
        assert entry is not None
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(row[token].item(), abs=1e-4)
        best = row.topk(num_top)
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def ask(island: Island, prompt: Sequence[int], **sampling: Any) -> list[GenerateUpdate]:
    return complete(island.address, prompt, **({"max_tokens": NUM_TOKENS} | GREEDY | sampling))


@pytest.mark.gate("gemma3", "deepseek_v3")
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "deepseek_v3", "qwen3_moe"])
def test_values_are_those_of_transformers_however_a_prompt_is_cut(family: str, tmp_path: Path) -> None:
    """Other requests do not ask for them. All come twice, so that prefixes are found the second time."""
    folder = save_checkpoint(family, tmp_path)
    oracle = load_oracle(folder)
    values = [values_of(oracle, prompt) for prompt in PROMPTS]
    expected = [greedy(oracle, prompt, NUM_TOKENS) for prompt in PROMPTS]
    for chunk in (7, 64):
        with running_island(folder, {"scheduler.max_batch_tokens": chunk}) as island:
            for _ in range(2):
                with ThreadPoolExecutor(2 * len(PROMPTS)) as pool:
                    asking = [pool.submit(ask, island, prompt, prompt_logprobs=NUM_TOP) for prompt in PROMPTS]
                    beside = [pool.submit(ask, island, prompt) for prompt in PROMPTS]
                assert [tokens_of(call.result()) for call in asking] == expected
                assert [tokens_of(call.result()) for call in beside] == expected
                for call, prompt, rows in zip(asking, PROMPTS, values, strict=True):
                    check(entries_of(call.result()), prompt, rows, NUM_TOP)
                    assert call.result()[-1].usage.cached_tokens == 0  # type: ignore[union-attr]


@pytest.mark.parametrize(("family", "choice"), [("gemma3", "local"), *(("qwen3", choice) for choice in CHOICES)])
def test_whichever_worker_computes_the_prompt(family: str, choice: str, tmp_path: Path) -> None:
    """The second time prefixes are found, but not those of gemma3's windows."""
    folder = save_checkpoint(family, tmp_path)
    oracle = load_oracle(folder)
    with adaptive_island(folder) as island, choosing(island, CHOICES[choice]):
        for _ in range(2):
            for prompt in PROMPTS:
                updates = ask(island, prompt, prompt_logprobs=NUM_TOP)
                check(entries_of(updates), prompt, values_of(oracle, prompt), NUM_TOP)
                assert tokens_of(updates) == greedy(oracle, prompt, NUM_TOKENS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("scored"))


@pytest.fixture(scope="module")
def island(folder: Path) -> Iterator[Island]:
    with running_island(folder) as island:
        yield island


@pytest.mark.parametrize("num_top", [0, 20])
def test_no_tokens_are_generated_where_none_are_asked_for(island: Island, folder: Path, num_top: int) -> None:
    prompt = PROMPTS[-1]
    updates = ask(island, prompt, max_tokens=0, prompt_logprobs=num_top, logprobs=1)
    check(entries_of(updates), prompt, values_of(load_oracle(folder), prompt), num_top)
    assert [update.finish_reason for update in updates if update.finish_reason] == ["length"]
    assert tokens_of(updates) == []
    assert not any(update.text or update.logprobs for update in updates)
    assert updates[-1].usage is not None
    assert updates[-1].usage.output_tokens == 0


def test_many_values_come_in_several_messages(island: Island, folder: Path) -> None:
    prompt = random_prompt(200, seed=5)
    updates = ask(island, prompt, prompt_logprobs=20)
    assert max(len(update.prompt_logprobs) for update in updates) < 64
    check(entries_of(updates), prompt, values_of(load_oracle(folder), prompt), 20)


@pytest.mark.usefixtures("in_graphs")
def test_beside_steps_and_prompts_in_graphs(tmp_path: Path) -> None:
    folder = save_checkpoint("qwen3", tmp_path)
    oracle = load_oracle(folder)
    prompts = [random_prompt(3 + 11 * number, seed=number) for number in range(8)]
    with adaptive_island(folder) as island, ThreadPoolExecutor(2 * len(prompts)) as pool:
        for _ in range(2):
            asking = [pool.submit(ask, island, prompt, prompt_logprobs=NUM_TOP) for prompt in prompts]
            beside = [pool.submit(ask, island, prompt) for prompt in prompts]
            for prompt, one, other in zip(prompts, asking, beside, strict=True):
                check(entries_of(one.result()), prompt, values_of(oracle, prompt), NUM_TOP)
                assert tokens_of(one.result()) == tokens_of(other.result()) == greedy(oracle, prompt, NUM_TOKENS)


def test_a_client_that_leaves_disturbs_nobody(island: Island, folder: Path) -> None:
    """It goes while its prompt is computed, and before it has read what there is."""
    prompt = random_prompt(200, seed=6)
    values = values_of(load_oracle(folder), prompt)
    with ThreadPoolExecutor(4) as pool:
        staying = [pool.submit(ask, island, prompt, prompt_logprobs=NUM_TOP) for _ in range(4)]
        for num_messages in (1, 2, 3):
            with island.client() as client:
                leaving = client.generate(prompt, max_tokens=40, prompt_logprobs=20, **GREEDY)
                for _ in range(num_messages):
                    assert next(leaving).prompt_logprobs
                leaving.close()
        for call in staying:
            check(entries_of(call.result()), prompt, values, NUM_TOP)
    until(lambda: all(one.cache.pages.free == one.cache.pages.total for one in island.workers))


def test_a_prompt_that_asks_leaves_a_prefix_behind(island: Island) -> None:
    prompt = random_prompt(64, seed=77)
    ask(island, prompt, prompt_logprobs=0)
    usage = ask(island, prompt)[-1].usage
    assert usage is not None
    assert usage.cached_tokens > 0


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        ({"prompt_logprobs": 21}, ["sampling.prompt_logprobs", "21", "20"]),
        ({"max_tokens": 0}, ["sampling.max_tokens", "0", "prompt_logprobs"]),
    ],
)
def test_what_is_refused(island: Island, sampling: dict[str, int], named: list[str]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ask(island, PROMPTS[2], **sampling)
    assert all(part in str(caught.value) for part in named)
