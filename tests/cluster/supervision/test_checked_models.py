"""Tests what the launcher refuses of a checkpoint before it starts a process."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.errors import ConfigError
from tandem.cluster.supervision.islands.checkpoint import check_model
from tests.support.checkpoints import save_checkpoint
from tests.support.encoder_models import save_t5gemma


@pytest.mark.parametrize("save", [lambda folder: save_checkpoint("deepseek_v4", folder), save_t5gemma])
def test_adapters_of_models_that_none_can_change(save: Callable[[Path], object], tmp_path: Path) -> None:
    save(tmp_path)
    settings = {"model.path": str(tmp_path), "model.dtype": "float32"}
    check_model(load_config(None, settings))
    with pytest.raises(ConfigError, match=r"^adapters\.max_resident is 2; for \w+ it must be 0: no adapter"):
        check_model(load_config(None, settings | {"adapters.max_resident": 2}))
