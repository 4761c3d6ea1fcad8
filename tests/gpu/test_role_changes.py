"""Processes on GPUs leave their island and form its next epoch, as they do when a cluster gets another shape."""

from pathlib import Path

import pytest

from tests.gpu.pair_cases import CASES, check_push, tokens_after
from tests.gpu.pe_process import NEEDS_NVSHMEM, pe_processes, together
from tests.gpu.worker_pair import EPOCH, NUM_PAGES, each, pair_configs, serving_pair
from tests.gpu.worker_process import WorkerPe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    NEEDS_NVSHMEM,
]


@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "puts"])
def test_processes_change_their_roles_with_the_weights_they_have(tmp_path: Path, mapped: bool) -> None:
    """They also change back. Each epoch has pages, PEs and graphs of its own."""
    case = CASES["bf16-128"]
    model = case.save(tmp_path)
    with pe_processes(2, WorkerPe) as processes:
        each(processes, "load", pair_configs(model, **case.settings), mapped)
        (model / "model.safetensors").unlink()
        tokens = []
        for epoch, order in enumerate((processes, processes[::-1], processes), EPOCH):
            if epoch > EPOCH:
                each(order, "rejoin", pair_configs(model, epoch, **case.settings))
            with serving_pair(order, epoch) as pair:
                assert pair.prefill.do("is_mapped", 1) == mapped
                check_push(pair, case.token_bytes)
                tokens.append(tokens_after(pair, "again"))
                assert pair.status()[1].free_pages == NUM_PAGES
        assert tokens[0] == tokens[1] == tokens[2]
        together(processes, "stop")


@pytest.mark.parametrize("order", ["same", "other"])
def test_islands_that_nobody_asks_for_anything(tmp_path: Path, order: str) -> None:
    """Five epochs of the same processes, in the same roles or in the other's each time, that serve and leave."""
    case = CASES["bf16-128"]
    model = case.save(tmp_path)
    with pe_processes(2, WorkerPe) as processes:
        each(processes, "load", pair_configs(model, **case.settings), True)
        for epoch in range(EPOCH, EPOCH + 5):
            if epoch > EPOCH:
                processes = processes if order == "same" else processes[::-1]
                each(processes, "rejoin", pair_configs(model, epoch, **case.settings))
            with serving_pair(processes, epoch) as pair:
                assert pair.status()[1].free_pages == NUM_PAGES
        together(processes, "stop")
