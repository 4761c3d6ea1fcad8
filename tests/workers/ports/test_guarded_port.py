from tandem.workers.ports.guarded_port import client_host


def test_hosts_of_clients() -> None:
    """The hosts follow from gRPC's names of client connections."""
    assert client_host("unix-abstract:tandem-0af1/ipv4:10.0.0.1:5678.12") == "ipv4:10.0.0.1"
    assert client_host("unix-abstract:tandem-0af1/ipv6:%5Bfe80::1%5D:5678.12") == "ipv6:[fe80::1]"
    assert client_host("ipv4:10.0.0.1:5678") == "ipv4:10.0.0.1"
