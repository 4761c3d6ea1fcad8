"""Each contract is tested on every transport, over layouts of two kinds."""

from collections.abc import Iterator

import pytest

from tandem.cache.plan.kv_scales import KVScales
from tandem.transfer.membership import TransportConfig
from tandem.transfer.transport import Transport
from tests.contracts.islands import ISLANDS, NUM_PAGES
from tests.transfer.layouts import latents_beside_kv, two_groups


@pytest.fixture(params=[latents_beside_kv(), two_groups(scales=KVScales.uniform(3))], ids=["latents", "fp8"])
def config(request: pytest.FixtureRequest) -> TransportConfig:
    return TransportConfig(0, 3, request.param, (NUM_PAGES, NUM_PAGES), num_signals=4, island="contract", epoch=7)


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
