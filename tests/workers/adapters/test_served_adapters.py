"""Requests with LoRA adapters, through the worker service: tokens equal PEFT's."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tandem.workers.config import AdapterSettings
from tests.support.adapter_workers import expected, serving
from tests.support.adapters import save_adapter
from tests.support.checkpoints import save_checkpoint
from tests.support.oracle import load_oracle, random_prompt

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def test_three_adapters_and_the_base_in_one_batch(tmp_path: Path) -> None:
    """Prompts come in chunks. One adapter has other ranks for some modules, one changes attention alone."""
    folder = save_checkpoint("qwen3", tmp_path / "model")
    model = load_oracle(folder)
    adapters = [
        save_adapter(model, tmp_path / "a", ALL, rank=4, seed=1, rank_pattern={"down_proj": 8}, use_rslora=True),
        save_adapter(model, tmp_path / "b", ("q_proj", "v_proj"), rank=2, seed=2, alpha_pattern={"layers.1.*": 9}),
        save_adapter(model, tmp_path / "c", ALL, rank=8, seed=3),
    ]
    prompts = [random_prompt(length, length) for length in (37, 21, 30, 40)]
    wanted = [expected(model, one, prompt, peft=True) for one, prompt in zip([*adapters, None], prompts, strict=True)]
    assert len({tuple(one) for one in wanted}) == 4
    with serving(folder, AdapterSettings(3, 8)) as workers:
        digests = [*(workers.load(one.name, one) for one in adapters), b""]
        with ThreadPoolExecutor(4) as pool:
            ids = ("r0", "r1", "r2", "r3")
            assert list(pool.map(workers.generate, ids, prompts, digests)) == wanted
        held = workers.info(workers.decode).adapters
        assert [(one.name, one.rank, one.resident, one.sequences) for one in held] == [
            ("a", 8, True, 0), ("b", 2, True, 0), ("c", 8, True, 0)
        ]  # fmt: skip
