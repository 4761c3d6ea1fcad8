"""Adaptive roles through the gRPC server: tokens equal transformers', whichever worker computes the prompt."""

from pathlib import Path

import pytest

from tandem.workers.decode.local_prompts import LocalPrompts
from tandem.workers.prefill.prefills import Prefills
from tests.support.checkpoints import save_checkpoint
from tests.support.client_requests import GREEDY, complete_all, complete_all_updates, tokens_of
from tests.support.island import running_island
from tests.support.oracle import greedy_all, load_oracle, random_prompt

CHUNK, PAGE, OUTPUT = 48, 8, 9
LENGTHS = (1, PAGE, CHUNK, CHUNK + 1, 2 * CHUNK + 5, 3 * CHUNK) * 4
ADAPTIVE = {
    "scheduler.roles": "adaptive",
    "scheduler.max_batch_tokens": CHUNK,
    "scheduler.token_seconds": 0.5,  # so that chunks beside rows are bounded, by what is measured
    "cache.num_pages": 512,
}


@pytest.mark.gate("llama", "gemma3")
@pytest.mark.parametrize("case", ["llama", "gemma3", "deepseek_v2"])
def test_prompts_are_pushed_or_computed_where_they_are_decoded(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[str] = []
    for kind, owner, name in (("local", LocalPrompts, "start"), ("pushed", Prefills, "submit")):
        call = getattr(owner, name)

        def noted(self: object, *arguments: object, kind: str = kind, call: object = call) -> object:
            computed.append(kind)
            return call(self, *arguments)  # type: ignore[operator]

        monkeypatch.setattr(owner, name, noted)
    folder = save_checkpoint(case, tmp_path)
    prompts = [random_prompt(length, number) for number, length in enumerate(LENGTHS)]
    with running_island(folder, ADAPTIVE) as island:
        answers = complete_all(island.address, prompts, max_tokens=OUTPUT, **GREEDY)
        again = complete_all_updates(island.address, prompts[::-1], max_tokens=OUTPUT, **GREEDY)
        for worker in island.workers:
            assert worker.cache.pages.free == worker.cache.pages.total
    expected = greedy_all(load_oracle(folder), prompts, OUTPUT)
    assert answers == expected
    assert [tokens_of(updates) for updates in again] == expected[::-1]
    assert set(computed) == {"local", "pushed"}
