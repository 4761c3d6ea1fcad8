"""Checkpoints of tests that name theirs by a fixture `case`, their oracles, and their models over a paged cache."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.cached_model import CachedModel
from tests.support.checkpoints import save_checkpoint
from tests.support.oracle import load_oracle

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@pytest.fixture(scope="module")
def saved(case: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(case, tmp_path_factory.mktemp(case))


@pytest.fixture(scope="module")
def oracle(saved: Path) -> "PreTrainedModel":
    return load_oracle(saved)


@pytest.fixture
def model(saved: Path) -> CachedModel:
    return CachedModel(saved, "float32")
