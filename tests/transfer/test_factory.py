import importlib.util

import pytest

from tandem.cache.plan.errors import InvalidArgument
from tandem.transfer.errors import TransportError
from tandem.transfer.factory import TRANSPORTS, create_transport
from tandem.transfer.membership import TransportConfig
from tandem.transfer.shared_memory import SharedMemoryTransport
from tests.transfer.layouts import two_groups

CONFIG = TransportConfig(pe=0, num_pes=1, layout=two_groups(), num_pages=(1, 1), num_signals=1, island="a", epoch=0)


def test_transports_are_known_by_name() -> None:
    assert isinstance(create_transport("shared_memory", CONFIG), SharedMemoryTransport)
    with pytest.raises(InvalidArgument, match=f"transport is 'pigeon'; it must be one of {', '.join(TRANSPORTS)}"):
        create_transport("pigeon", CONFIG)


@pytest.mark.skipif(importlib.util.find_spec("nvshmem") is not None, reason="nvshmem4py is installed")
def test_what_nvshmem_lacks_is_said() -> None:
    with pytest.raises(TransportError, match=r"No module named 'nvshmem'; pip install 'tandem-serve\[cuda13\]' or "):
        create_transport("nvshmem", CONFIG)
