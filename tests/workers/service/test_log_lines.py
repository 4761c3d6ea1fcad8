"""Checks that a worker's log lines name the request, whichever part fails."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.client import Client
from tandem.workers.decode.decodes import Decodes
from tandem.workers.logs import LogSettings, formatter, of_requests
from tandem.workers.prefill.forwards import PromptForwards
from tandem.workers.prefill.speculative_prefill import SpeculativePrefill
from tandem.workers.requests.prefill_request import SpeculativePrompt
from tandem.workers.runner.model_runner import ModelRunner
from tandem.workers.wire.lease import Lease
from tests.support.checkpoints import save_checkpoint
from tests.support.client_requests import GREEDY, tokens_of
from tests.support.island import Island, running_island
from tests.support.oracle import greedy, load_oracle, random_prompt

MOST_TRIES = 20
PROMPT = random_prompt(150, 0)  # three chunks, of which one may be computed speculatively


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("log"))


@pytest.fixture(scope="module")
def island(folder: Path) -> Iterator[Island]:
    with running_island(folder, {"cache.prefix_sharing": False}) as made:
        yield made


@pytest.mark.parametrize(
    ("part", "method", "message"),
    [
        (SpeculativePrefill, "_compute", "a speculative prefill failed"),
        (PromptForwards, "launch", "a prefill forward failed"),
        (Decodes, "_receive", "receiving KV failed"),
        (ModelRunner, "step", "a decode forward failed"),
        (Decodes, "prepare", "a call failed"),
    ],
)
def test_a_failure_is_logged_with_the_request(
    island: Island,
    folder: Path,
    part: Any,
    method: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The request goes on: it is placed once more. On a busy machine a prompt can be sent before it was computed
    speculatively, so several are tried."""
    real, failures = getattr(part, method), iter([RuntimeError("as the test says")])

    def fail_once(*given: Any, **named: Any) -> Any:
        for error in failures:
            raise error
        return real(*given, **named)

    monkeypatch.setattr(part, method, fail_once)
    name, expected, records = "", greedy(load_oracle(folder), PROMPT, 4), list[logging.LogRecord]()
    with caplog.at_level(logging.ERROR, "tandem.workers"), Client(island.address) as client:
        for number in range(MOST_TRIES):
            name = f"request-{method}-{number}"
            updates = list(client.generate(PROMPT, request_id=name, timeout=60, max_tokens=4, **GREEDY))
            assert tokens_of(updates) == expected
            records = [one for one in caplog.records if one.message == message]
            if records:
                break
    (record,) = records
    assert record.exc_info
    line = formatter(LogSettings(), "").format(record).splitlines()[0]
    assert line.partition(" request_id=")[2].endswith(f"/{name}")


def test_a_line_about_several_requests_names_them_all() -> None:
    lease = Lease(1.0)
    prompts = [SpeculativePrompt(name, 0, (), lease) for name in ("a", "b", "c" * 500)]  # type: ignore[arg-type]
    assert of_requests(*prompts) == {"fields": {"request_ids": ["a", "b", "c" * 160]}}
    assert of_requests() == {"fields": {}}
