"""A policy that is added to the table is taken by the configuration, and orders the pairs of each request."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import MappingProxyType

import pytest

from tandem.cluster.config import sections
from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.errors import ConfigError
from tandem.cluster.gateway import gateway
from tandem.cluster.routing.policy import POLICIES, Ask, Pair, WorkerLoad, least_loaded
from tests.cluster.open_gateway import BODY, PROMPT, TOKENS, open_gateway
from tests.support.checkpoints import save_checkpoint
from tests.support.http_client import COMPLETIONS, answer, post, refused


def test_it_places_the_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Ask] = []

    def at_most_one(workers: Sequence[WorkerLoad], ask: Ask, turn: int) -> Iterator[Pair]:
        """The second request finds no pair, so it waits until its time is over."""
        asked.append(ask)
        return least_loaded(workers, ask, turn) if ask.prompt_tokens == len(PROMPT) else iter(())

    for module in (sections, gateway):
        monkeypatch.setattr(module, "POLICIES", MappingProxyType({**POLICIES, "at_most_one": at_most_one}))
    options = {"gateway.routing_policy": "at_most_one", "gateway.queue_seconds": 0.2}
    with open_gateway(save_checkpoint("llama", tmp_path), options) as opened:
        (choice,) = answer(opened.http, COMPLETIONS, **BODY)["choices"]
        assert choice["token_ids"] == TOKENS
        assert (asked[0].prompt_tokens, asked[0].max_tokens) == (len(PROMPT), len(TOKENS))
        refused(post(opened.http, COMPLETIONS, BODY | {"prompt": [*PROMPT, 1]}), 504)
    with pytest.raises(ConfigError, match=r"it must be least_loaded or prefix_aware or at_most_one"):
        load_config(None, {"gateway.routing_policy": "random"})
