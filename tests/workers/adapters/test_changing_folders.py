"""A folder that is replaced while the ranks of a worker read it: none keeps what they read, and all go on."""

from pathlib import Path

import grpc
import pytest
from torch import Tensor

from tandem.proto import worker_pb2
from tandem.workers.adapters.peft_folder import AdapterReader, Found
from tandem.workers.config import AdapterSettings
from tests.support.adapter_workers import EPOCH, expected, serving
from tests.support.adapters import save_adapter
from tests.support.checkpoints import save_checkpoint
from tests.support.oracle import load_oracle, random_prompt

PROMPT = random_prompt(20, 3)


@pytest.mark.gate("other")
@pytest.mark.parametrize("later", ["other", "none"])
def test_ranks_that_read_different_files_load_none(later: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """later: what the second rank finds in the folder. Host memory holds two adapters, so a third try needs what the
    others gave back."""
    folder = save_checkpoint("llama", tmp_path / "model")
    oracle = load_oracle(folder)
    first, _ = (save_adapter(oracle, tmp_path / name, ("q_proj", "o_proj"), seed=len(name)) for name in ("a", "other"))
    read, seen = AdapterReader.read, list[tuple[Path, int]]()

    def replaced(self: AdapterReader, path: Path, numbers: Tensor) -> Found:
        seen.append((path, self.config.shard.rank))
        return read(self, path if not self.config.shard.rank else tmp_path / later, numbers)

    with serving(folder, AdapterSettings(2, 4, 100_000), {"island.decode_ranks": 2}) as workers:
        request = worker_pb2.LoadAdapterRequest(epoch=EPOCH, name="a", path=str(first))
        monkeypatch.setattr(AdapterReader, "read", replaced)
        for _ in range(4):
            with pytest.raises(grpc.RpcError) as caught:
                workers.decode.LoadAdapter(request, timeout=30)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert "has changed while it was read" in str(caught.value)
        assert {rank for _, rank in seen} == {0, 1}
        assert not workers.info(workers.decode).adapters
        monkeypatch.undo()
        (digest,) = {stub.LoadAdapter(request, timeout=30).digest for stub in (workers.prefill, workers.decode)}
        assert workers.generate("r", PROMPT, digest) == expected(oracle, first, PROMPT)
        assert not any(one.lost for one in workers.island.workers)
