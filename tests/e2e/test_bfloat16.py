"""bfloat16: log-probabilities through the gRPC server against transformers in bfloat16 on the same tokens.

Both sides round to 8 bits after every product, in different orders, so logits are compared and not tokens. The
tolerance is in logits whose standard deviation is about 1.
"""

from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import save_checkpoint
from tests.support.client_requests import GREEDY, complete, tokens_of
from tests.support.island import running_island
from tests.support.oracle import load_oracle, random_prompt
from tests.support.tolerances import BFLOAT16_LOGPROB


@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3", "mistral", "phi3-head-dim"])
def test_logprobs_in_bfloat16(case: str, tmp_path: Path) -> None:
    folder = save_checkpoint(case, tmp_path)
    prompt = random_prompt(70, 1)
    with running_island(folder, {"model.dtype": "bfloat16"}) as island:
        updates = complete(island.address, prompt, max_tokens=12, logprobs=5, **GREEDY)
        pools = {(pool.dtype, pool.shape[-1]) for worker in island.workers for pool in worker.pools}
        assert pools == {(torch.bfloat16, 128 if case == "phi3-head-dim" else 64)}, "as wide as kernels on a GPU take"
    tokens = tokens_of(updates)
    with torch.inference_mode():
        logits = load_oracle(folder, torch.bfloat16)(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    expected = logits.float().log_softmax(-1)
    entries = [entry for update in updates for entry in update.logprobs]
    assert len(entries) == 12
    for row, entry in enumerate(entries):
        for token, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            assert logprob == pytest.approx(expected[row, token].item(), abs=BFLOAT16_LOGPROB)
