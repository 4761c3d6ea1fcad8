"""What headers tell of an adapter's memory is no more than a worker takes for one, and almost all of it."""

from pathlib import Path

import pytest

from tandem.workers.checkpoint.adapter_bytes import least_adapter_bytes
from tandem.workers.config import AdapterSettings
from tandem.workers.models.registry import load_config
from tandem.workers.models.weights import load_decoder
from tests.support.checkpoints import save_checkpoint
from tests.workers.adapters.test_families import FAMILIES

RANK = 16
WHOLE = ("llama", "mistral", "phi3", "qwen2", "gemma2", "gemma3", "seed_oss")  # which have nothing else that adapts


@pytest.mark.gate("llama", "gemma4")
@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_takes_less(family: str, tmp_path: Path) -> None:
    folder = save_checkpoint(family, tmp_path)
    config = load_config(folder, "float32")
    weights = load_decoder(folder, config, adapters=AdapterSettings(1, RANK)).adapted
    assert weights is not None
    least = least_adapter_bytes(folder, "float32", RANK, 1)
    assert least <= weights.slot_bytes
    if family in WHOLE:
        assert least > 0.98 * weights.slot_bytes
