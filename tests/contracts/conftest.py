"""Each contract is tested on every transport, over layouts of three kinds."""

from collections.abc import Iterator

import pytest

from tandem.cache.plan.kv_scales import KVScales
from tandem.transfer.membership import TransportConfig
from tandem.transfer.transport import Transport
from tests.contracts.islands import ISLANDS, pages_of
from tests.transfer.layouts import entries_beside, latents_beside_kv, two_groups

LAYOUTS = {"latents": latents_beside_kv(), "fp8": two_groups(scales=KVScales.uniform(3)), "entries": entries_beside()}


@pytest.fixture(params=LAYOUTS.values(), ids=list(LAYOUTS))
def config(request: pytest.FixtureRequest) -> TransportConfig:
    return TransportConfig(0, 3, request.param, pages_of(request.param), num_signals=4, island="contract", epoch=7)


@pytest.fixture(params=ISLANDS)
def unjoined(request: pytest.FixtureRequest, config: TransportConfig) -> Iterator[list[Transport]]:
    transports = ISLANDS[request.param](config)
    yield transports
    for transport in transports:
        transport.close()


@pytest.fixture
def island(unjoined: list[Transport]) -> list[Transport]:
    handles = [transport.open() for transport in unjoined]
    for transport in unjoined:
        transport.join(handles)
    return unjoined
