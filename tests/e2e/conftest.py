"""A checkpoint for all tests that start a cluster."""

from pathlib import Path

import pytest

from tandem.cluster.tools.random_checkpoint import make_checkpoint


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "model"
    make_checkpoint(folder, arch="llama", size="tiny", seed=3)
    return folder
