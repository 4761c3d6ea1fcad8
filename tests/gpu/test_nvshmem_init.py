"""NVSHMEM's init in processes that have used the memory before."""

import pytest

from tandem.transfer.membership import TransportConfig
from tests.gpu.pe_process import NEEDS_NVSHMEM, join, pe_processes, together
from tests.transfer.layouts import two_groups

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120), NEEDS_NVSHMEM]


@pytest.mark.parametrize("thread", [True, False], ids=["with", "without"])
def test_what_pinned_memory_holds_ends_no_island(thread: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 is what NVSHMEM's proxy thread, which it has where there is a NIC, waits for: it then thinks that a kernel has
    called nvshmem_global_exit()."""
    if thread:
        monkeypatch.setenv("NVSHMEM_DISABLE_LOCAL_ONLY_PROXY", "0")
    config = TransportConfig(0, 2, two_groups(), (4, 4), num_signals=4, island="gpu", epoch=7)
    with pe_processes(2) as processes:
        for _ in range(3):
            together(processes, "soil_pinned_memory", 2)
            join(processes, config, True)
            assert all(together(processes, "are_zero"))
            together(processes, "call", "close")
