"""Steps of compressed KV in graph buffers give the tokens of plain forwards, and transformers'; so do forwards that are
looked up by token. On a CPU nothing is captured: each replay computes what a graph would."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from tandem.cache.attention import compressed_tokens
from tandem.cache.attention.forward import Batch
from tandem.cache.attention.graph_buffers import GraphBuffers
from tandem.cache.kernels.base import Limits
from tandem.cache.kernels.compressed.choice import choose_token_kernels
from tandem.cache.operations import forwards
from tests.support.cached_model import CachedModel
from tests.support.checkpoints import make_model
from tests.support.oracle import greedy, likeliest, load_oracle, random_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLOAT32 = 1e-4  # relative and absolute
OUTPUT = 40  # of steps: entries of both kinds are completed
TEXTS = {"deepseek_v4": (1, 3, 23, 30, 70), "deepseek_v4-128": (100, 125, 2)}


@pytest.fixture(scope="module", params=TEXTS)
def case(request: pytest.FixtureRequest) -> str:
    return request.param


@torch.inference_mode()
def step(model: CachedModel, buffers: GraphBuffers, batch: Batch, tokens: list[int]) -> list[int]:
    forward = model.cache.begin(batch, buffers, [np.array(tokens)])
    logits = model.runner._model.forward(buffers.inputs[0], buffers.attention(), None)
    model.cache.commit(forward)
    return logits[: len(tokens)].argmax(1).tolist()


@pytest.fixture
def by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager forwards, too, as on a GPU."""
    monkeypatch.setattr(forwards, "takes_by_token", lambda groups, tokens: tokens.trees is None)


@pytest.mark.gate("deepseek_v4-128")
def test_steps_give_the_tokens_of_transformers(case: str, model: CachedModel, oracle: "PreTrainedModel") -> None:
    """Sequences come and go, so that rows are padded, and others that complete an entry stand in each row."""
    small, large = model.cache.graph_buffers([Limits.of_step(size, 4, 1) for size in (2, 6)])
    texts = [random_prompt(length, length) for length in TEXTS[case]]
    outputs = list[list[int]]()
    for sequence, text in enumerate(texts):
        model.cache.add_sequence(sequence)
        outputs.append(model.sample(model.step({sequence: text})))
    while open_ones := [one for one, output in enumerate(outputs) if len(output) < OUTPUT - one]:
        order = open_ones[::-1] if len(outputs[open_ones[0]]) % 2 else open_ones
        buffers = small if len(order) <= 2 else large
        for one, token in zip(
            order, step(model, buffers, Batch(order), [outputs[one][-1] for one in order]), strict=True
        ):
            outputs[one].append(token)
    for one, (text, output) in enumerate(zip(texts, outputs, strict=True)):
        assert len(output) == OUTPUT - one
        assert output == likeliest(oracle, text, output)


@pytest.mark.gate("deepseek_v4-128")
def test_verify_steps_give_the_tokens_of_transformers(case: str, model: CachedModel, oracle: "PreTrainedModel") -> None:
    """A sequence has three rows, and the last two are popped by turns. Entries are made of earlier rows."""
    (buffers,) = model.cache.graph_buffers([Limits.of_verification(8, 4, 1)])
    texts = [random_prompt(length, length) for length in TEXTS[case][:2]]
    expected = [greedy(oracle, text, OUTPUT) for text in texts]
    for sequence, text in enumerate(texts):
        model.cache.add_sequence(sequence)
        model.step({sequence: text})
    done = 0
    while done + 4 < OUTPUT:
        wrong = done % 2
        rows = [[*output[done : done + 1], *([7, 8] if wrong else output[done + 1 : done + 3])] for output in expected]
        batch = Batch([0, 1], [3, 3], scratch=2)
        found = step(model, buffers, batch, [token for row in rows for token in row])
        kept = 1 if wrong else 3
        for sequence in range(2):
            assert found[3 * sequence :][:kept] == expected[sequence][done + 1 :][:kept]
            model.cache.pop(sequence, 3 - kept)
        done += kept


@pytest.mark.gate("deepseek_v4-128")
@torch.inference_mode()
@pytest.mark.usefixtures("by_token")
def test_forwards_by_token_give_the_logits_of_transformers(
    case: str, model: CachedModel, oracle: "PreTrainedModel"
) -> None:
    """Chunks that end before, at and after entries, and sequences beside each other."""
    text = random_prompt(150, 0)
    expected = oracle(torch.tensor([text])).logits[0]
    for sequence, splits in enumerate(([], [24], [3, 4, 5, 27, 32, 33], [127, 128, 129], [149])):
        model.cache.add_sequence(sequence)
        logits = model.feed(sequence, text, splits)
        torch.testing.assert_close(logits, expected[-1:], rtol=FLOAT32, atol=FLOAT32)
        model.cache.remove_sequence(sequence)
    for sequence, length in enumerate((1, 40, 64)):
        model.cache.add_sequence(10 + sequence)
        model.step({10 + sequence: text[:length]})
    logits = model.step({10: text[1:71], 11: text[40:41], 12: text[64:69]})
    torch.testing.assert_close(logits, expected[[70, 40, 68]], rtol=FLOAT32, atol=FLOAT32)


@pytest.mark.long
@torch.inference_mode()
@pytest.mark.usefixtures("by_token")
def test_the_kernels_of_a_gpu_give_the_logits_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in Triton's interpreter where there is no GPU. A prompt in two chunks is longer than the window. Then steps
    in graph buffers complete entries of both kinds, more of which are there than are chosen."""
    pytest.importorskip("triton")
    kernels = choose_token_kernels(torch.device("cuda"))
    monkeypatch.setattr(compressed_tokens, "choose_token_kernels", lambda device: kernels)
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}
    small = make_model("deepseek_v4", compress_rates=rates, sliding_window=8, index_topk=3)
    small.save_pretrained(tmp_path)
    saved, text = tmp_path, random_prompt(16, 0)
    model, expected = CachedModel(saved, "float32", DEVICE), load_oracle(saved)(torch.tensor([text])).logits[0]
    model.cache.add_sequence(0)
    found = [model.feed(0, text[:14], [11])]
    (buffers,) = model.cache.graph_buffers([Limits.of_step(2, 4, 1)])
    for position in (14, 15):
        forward = model.cache.begin(Batch([0]), buffers, [np.array(text[position : position + 1])])
        found.append(model.runner._model.forward(buffers.inputs[0], buffers.attention(), None)[:1])
        model.cache.commit(forward)
    torch.testing.assert_close(torch.cat(found).cpu(), expected[13:], rtol=FLOAT32, atol=FLOAT32)
