import pytest

from tandem.cluster.errors import StartFailed
from tandem.cluster.ray_processes import RayProcesses


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1", "127.0.0.1:ray", "127.0.0.1:70000", "ray://x:1"])
def test_an_address_without_a_ray_is_refused_before_ray_tries_it(address: str) -> None:
    with pytest.raises(StartFailed, match=f"^--address is '{address}': .*; HOST:PORT of a Ray that runs is accepted"):
        RayProcesses(address).start("c", None)
