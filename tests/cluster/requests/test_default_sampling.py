"""Sampling parameters that a checkpoint advises, for requests that name none."""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.errors import ConfigError
from tandem.cluster.requests.default_sampling import FIELDS, default_sampling
from tandem.cluster.supervision.launcher import Cluster
from tests.cluster.fake_processes import FakeProcesses
from tests.support.checkpoints import save_checkpoint
from tests.support.client_requests import complete, tokens_of
from tests.support.http_client import COMPLETIONS, answer
from tests.support.island import Island, running_island

ADVICE = {"temperature": 0.7, "top_p": 0.75, "top_k": 9, "min_p": 0.03125, "repetition_penalty": 1.5}
PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
REQUEST: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "seed": 7}
PROMPT = [5, 6, 7]


def advise(folder: Path, advice: Mapping[str, Any]) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(advice))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return advise(save_checkpoint("llama", tmp_path_factory.mktemp("advice")), {**ADVICE, "do_sample": False})


@pytest.fixture(scope="module")
def islands(model: Path) -> Iterator[dict[str, Island]]:
    """Runs islands by the source of their default parameters."""
    with ExitStack() as stack:
        yield {
            source: stack.enter_context(
                running_island(model, {"model.generation_config": source, "gateway.http_port": 0})
            )
            for source in ("auto", "none")
        }


def tokens(island: Island, **sampling: Any) -> list[int]:
    """The same over gRPC and HTTP."""
    given = tokens_of(complete(island.address, PROMPT, **REQUEST, **sampling))
    body = {"prompt": PROMPT, "return_token_ids": True, **REQUEST, **sampling}
    assert answer(island.http, COMPLETIONS, **body)["choices"][0]["token_ids"] == given
    return given


def test_requests_that_name_none_get_the_checkpoints(islands: dict[str, Island]) -> None:
    assert tokens(islands["auto"]) == tokens(islands["none"], **ADVICE)
    assert tokens(islands["none"]) == tokens(islands["auto"], **PLAIN)
    assert tokens(islands["auto"]) != tokens(islands["none"])


@pytest.mark.parametrize("name", FIELDS)
def test_what_a_request_names_goes_first(islands: dict[str, Island], name: str) -> None:
    named = {name: PLAIN[name]}
    assert tokens(islands["auto"], **named) == tokens(islands["none"], **(ADVICE | named))


@pytest.mark.parametrize("advice", [{}, {"temperature": None, "max_new_tokens": 5}, {"top_k": -1}])
def test_without_advice_nothing_changes(tmp_path: Path, advice: dict[str, Any]) -> None:
    assert default_sampling(advise(tmp_path, advice), "auto") == {}
    (tmp_path / "generation_config.json").unlink()
    assert default_sampling(tmp_path, "auto") == {}


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("temperature", 200, r"in \[0, 100\]"),
        ("temperature", "hot", "a finite number"),
        ("temperature", 10**400, "a finite number"),
        ("top_p", 0, r"in \(0, 1\]"),
        ("top_k", 0.5, "an integer"),
        ("top_k", 1 << 40, "at most"),
        ("min_p", 2, r"in \[0, 1\]"),
        ("repetition_penalty", 0, r"in \[0\.01, 100\]"),
        ("repetition_penalty", True, "a finite number"),
    ],
)
def test_what_no_request_may_have_is_refused_before_anything_starts(
    model: Path, tmp_path: Path, name: str, value: object, accepted: str
) -> None:
    for path in model.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "generation_config.json").unlink()
    advise(tmp_path, {name: value})
    processes = FakeProcesses()
    with pytest.raises(ConfigError, match=rf"generation_config\.json: {name} .*{accepted}"):
        Cluster(load_config(None, {"model.path": str(tmp_path), "gateway.port": 0}), processes).start()
    assert not processes.specs
