"""One gateway for the tests of a module, whose model writes what they say."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.cluster.text.tokenizer import Tokenizer
from tests.cluster.open_gateway import OpenGateway, open_gateway
from tests.cluster.scripted_model import EOS, Script, make_scripted


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_scripted(tmp_path_factory.mktemp("scripted") / "model")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def script(tokenizer: Tokenizer) -> Script:
    return Script(tokenizer)


@pytest.fixture(scope="module")
def gateway(folder: Path, script: Script) -> Iterator[OpenGateway]:
    with open_gateway(folder, say=script.say, stop_token=EOS, max_model_len=1024) as gateway:
        yield gateway


@pytest.fixture
def model(gateway: OpenGateway, script: Script) -> Iterator[Script]:
    """Writes what the test says, for a gateway that has no other request."""
    yield script
    gateway.worker.prompts.clear()
