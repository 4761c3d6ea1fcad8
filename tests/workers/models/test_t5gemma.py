"""T5Gemma's logits and steps against transformers, eagerly and in graph buffers, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tandem.cache.plan.errors import InvalidArgument
from tandem.workers.checkpoint.errors import UnsupportedFeature
from tandem.workers.config import SpeculationSettings
from tandem.workers.models.drafters.drafter_config import load_drafter_config
from tandem.workers.models.kv_scales import stores_fp8
from tandem.workers.models.registry import load_config
from tandem.workers.runner.encoder_prompts import PromptChunks
from tandem.workers.runner.step_inputs import StepInputs
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.sampling.sampling_params import SamplingParams
from tests.cache.table_kernels import TableKernels
from tests.support.encoder_models import START, EncoderRunner, greedy_behind, save_t5gemma
from tests.support.oracle import random_prompt
from tests.support.prompt_programs import RunInOnePlace

DEEP = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "alike": ({}, {}),
    "a wider encoder, caps that cut deep": ({"hidden_size": 96, "head_dim": 24, "num_hidden_layers": 3, **DEEP}, DEEP),
    "one KV head, a longer decoder": ({"num_key_value_heads": 1}, {"num_key_value_heads": 1, "num_hidden_layers": 3}),
}
PROMPTS = [(random_prompt(70, 1), [START, *random_prompt(60, 2)]), (random_prompt(16, 3), [START])]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_logits_equal_transformers(case: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path) -> None:
    """Encoders' prompts are longer than the window and than a chunk, and decoders' prompts come in chunks."""
    model = save_t5gemma(tmp_path, *case)
    for row, (encoder, decoder) in zip(EncoderRunner(tmp_path).prefill(PROMPTS, chunk=20), PROMPTS, strict=True):
        ids, begin = torch.tensor([encoder]), torch.tensor([decoder])
        masks = {"attention_mask": torch.ones_like(ids), "decoder_attention_mask": torch.ones_like(begin)}
        with torch.inference_mode():
            expected = model(input_ids=ids, decoder_input_ids=begin, **masks).logits[0, -1]
        torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-4)


def test_steps_in_graph_buffers_give_the_same_tokens(tmp_path: Path) -> None:
    """Decode steps and verify steps, of sequences after encoders of unlike lengths."""
    model = save_t5gemma(tmp_path)
    expected = [greedy_behind(model, encoder, 9, decoder[1:]) for encoder, decoder in PROMPTS]
    runner = EncoderRunner(tmp_path, kernels=TableKernels, capture=RunInOnePlace())
    first = runner.prefill(PROMPTS).argmax(1).tolist()
    assert first == [tokens[0] for tokens in expected]
    assert runner.steps(first, 5) == [tokens[1:6] for tokens in expected]
    followed = runner.verify([tokens[5:8] for tokens in expected])
    assert followed == [token for tokens in expected for token in tokens[6:9]]


def rewrite(folder: Path, half: str, **changes: Any) -> None:
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    fields[half] |= changes
    path.write_text(json.dumps(fields))


def test_what_is_not_served_is_named(tmp_path: Path) -> None:
    save_t5gemma(tmp_path)
    config = load_config(tmp_path)
    assert config.decoder_start_token_id == START
    assert config.max_length == 512
    assert config.max_encoder_tokens(100, 16) == 96
    with pytest.raises(InvalidArgument, match="T5GemmaForConditionalGeneration has an encoder, whose K and V"):
        stores_fp8("fp8_e4m3", config)
    with pytest.raises(
        UnsupportedFeature, match=r"speculation.method is 'draft_model'; with T5Gemma.* it must be ngram"
    ):
        load_drafter_config(SpeculationSettings(method="draft_model", draft=str(tmp_path), tokens=2), config)
    rewrite(tmp_path, "encoder", vocab_size=200)
    with pytest.raises(UnsupportedFeature, match="vocabulary of 200 tokens, the decoder one of 199"):
        load_config(tmp_path)
    rewrite(tmp_path, "encoder", vocab_size=199, attention_bias=True)
    with pytest.raises(UnsupportedFeature, match="encoder: attention_bias is true"):
        load_config(tmp_path)
    rewrite(tmp_path, "encoder", attention_bias=False, rope_parameters={"rope_type": "dynamic", "factor": 2.0})
    with pytest.raises(UnsupportedFeature, match="rope_type is 'dynamic', by length"):
        load_config(tmp_path)


def test_an_encoders_prompt_alone_beside_decode_rows(tmp_path: Path) -> None:
    """Its chunk ends where the decoder's prompt begins: the rows step, and no prompt ends."""
    model = save_t5gemma(tmp_path)
    runner = EncoderRunner(tmp_path)
    (first,) = runner.prefill(PROMPTS[:1]).argmax(1).tolist()
    expected = greedy_behind(model, PROMPTS[0][0], 2, PROMPTS[0][1][1:])
    runner.cache.add_sequence(1, 16)
    sampling = SampleBatch.from_params([SamplingParams(temperature=0)])
    position = np.array([runner.cache.num_tokens(0) + 1])
    inputs = StepInputs(np.array([first]), np.array([-1]), sampling, position)
    chunks = PromptChunks([1], [np.array(PROMPTS[1][0])], [17])
    pending, logits = runner.runner.step_with_prompts([0], inputs, chunks)
    assert [first, *pending.wait().token_ids.tolist()] == expected
    assert logits.shape[0] == 0
    assert runner.cache.num_tokens(1) == 16
