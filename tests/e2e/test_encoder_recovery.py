"""A model with an encoder when a worker dies: the stream goes on, with both prompts computed again."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.client import Client
from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.supervision.launcher import Cluster
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tests.e2e.test_recovery import OVERRIDES, attempts, epochs, whole, working
from tests.support.client_requests import complete, tokens_of
from tests.support.encoder_models import greedy_behind, load_t5gemma
from tests.support.local_processes import LocalProcesses
from tests.support.oracle import random_prompt
from tests.support.steady_steps import STEADY
from tests.support.waiting import until

COUNT, GREEDY = 300, {"temperature": 0, "ignore_eos": True}


@pytest.mark.gate("decode")
@pytest.mark.parametrize("lost", [0, 1], ids=["prefill", "decode"])
def test_a_worker_dies_and_the_stream_goes_on(tmp_path: Path, lost: int) -> None:
    make_checkpoint(tmp_path, "t5gemma")
    model = load_t5gemma(tmp_path)
    encoder, decoder = random_prompt(45, 1, 512), random_prompt(7, 2, 512)
    start = model.generation_config.bos_token_id
    expected = greedy_behind(model, encoder, COUNT, decoder, start=start)
    sampling: dict[str, Any] = {"decoder_prompt": decoder, "max_tokens": COUNT, **GREEDY}
    cluster = Cluster(load_config(None, {"model.path": str(tmp_path), **OVERRIDES}), LocalProcesses(STEADY))
    address = cluster.start()
    try:
        assert tokens_of(complete(address, encoder, **sampling)) == expected
        until(lambda: whole(address))
        before = sum(epochs(address))
        updates = []
        with Client(address) as client:
            for update in client.generate(encoder, timeout=100, **sampling):
                updates.append(update)
                if len(updates) == 3:
                    os.kill(working(address)[lost].pid, signal.SIGKILL)
        assert tokens_of(updates) == expected
        assert attempts(updates) == 1 + lost
        until(lambda: sum(epochs(address)) == before + 1 and whole(address))
    finally:
        cluster.stop()
