"""Fixtures of the tests of step loops."""

from pathlib import Path

import pytest

from tests.support.checkpoints import save_checkpoint
from tests.workers.loop_pair import LoopPair


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def pair(folder: Path) -> LoopPair:
    return LoopPair(folder)
