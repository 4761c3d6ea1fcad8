"""Changes logits by sampling parameters as vLLM documents it: in lists and loops, one token at a time."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tandem.workers.runner.eager_sampler import EagerSampler
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.sampling.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def processed(
    logits: np.ndarray, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], stop_ids: Sequence[int]
) -> np.ndarray:
    """Returns the processed logits, float32 [vocab], for the token after prompt and output."""
    row = logits.astype(np.float32)
    if params.allowed_token_ids:
        row[[token for token in range(row.size) if token not in params.allowed_token_ids]] = -np.inf
    for word in params.bad_words_ids:
        before = list(word[:-1])
        if len(before) <= len(output) and list(output[len(output) - len(before) :]) == before:
            row[word[-1]] = -np.inf
    if len(output) < params.min_tokens:
        row[list(stop_ids)] = -np.inf
    for token, bias in params.logit_bias:
        row[token] += np.float32(bias)
    repetition, frequency, presence = (
        np.float32(one) for one in (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    )
    for token in {*prompt, *output}:
        row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
    for token in set(output):
        row[token] -= frequency * np.float32(list(output).count(token))
        row[token] -= presence
    return row


def random_params(number: int, vocab: int, prompt: Sequence[int], **others: Any) -> SamplingParams:
    """Draws some of the parameters, so strong that they change most tokens. others: fields of SamplingParams."""
    rng = np.random.default_rng(number)
    fields: dict[str, Any] = {
        "presence_penalty": round(float(rng.uniform(-2, 2)), 2),
        "frequency_penalty": round(float(rng.uniform(-1, 2)), 2),
        "repetition_penalty": round(float(rng.uniform(0.7, 1.8)), 2),
        "logit_bias": tuple((int(t), float(rng.uniform(-5, 5))) for t in rng.choice(vocab, 9, replace=False)),
        "bad_words_ids": tuple(
            tuple(map(int, rng.choice([*prompt, *range(5, 40)], rng.integers(1, 4)))) for _ in range(20)
        ),
        "allowed_token_ids": tuple(map(int, rng.choice(vocab, vocab // 2, replace=False))),
        "min_tokens": int(rng.integers(1, 6)),
    }
    for name in rng.choice(list(fields), rng.integers(0, len(fields)), replace=False):
        del fields[name]
    fields["stop_token_ids"] = tuple(map(int, rng.choice(vocab, 12, replace=False)))
    return SamplingParams(**{**fields, **others})


@torch.inference_mode()
def generate(model: "PreTrainedModel", prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """Returns the output of a request with ignore_eos, from whole forwards of transformers."""
    sampler, output = EagerSampler(torch.device("cpu")), list[int]()
    bare = SampleBatch.from_params([params])
    while len(output) < params.max_tokens and not (output and output[-1] in params.stop_token_ids):
        ids = torch.tensor([[*prompt, *output]])
        logits = model(ids).logits[0, -1].float().numpy()
        row = torch.from_numpy(processed(logits, params, prompt, output, params.stop_token_ids))[None]
        position = np.array([len(prompt) + len(output)])
        output.append(int(sampler.sample(row, bare, position).wait().token_ids[0]))
    return output
