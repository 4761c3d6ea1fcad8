"""Adapters on workers of several ranks, over quantized weights, of requests that are parked, and in records."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tandem.cluster.cli.replayed_workers import replay_files
from tandem.proto import worker_pb2
from tandem.workers.config import AdapterSettings
from tandem.workers.runner.encoder_prompts import PromptChunks
from tandem.workers.sampling.prompt_logprobs import Scored
from tests.support.adapted_model import AdaptedModel
from tests.support.adapter_workers import EPOCH, Workers, expected, serving
from tests.support.adapters import merged, save_adapter
from tests.support.checkpoints import make_model, save_checkpoint, sizes_for_ranks
from tests.support.likely_drafters import make_head, make_llama, make_mtp, make_smaller
from tests.support.oracle import load_oracle, random_prompt
from tests.support.prompt_specs import prompt_message
from tests.support.quantized_checkpoints import SINGLE
from tests.workers.adapters.test_families import FAMILIES
from tests.workers.models.test_quantized import CASES, save_quantized

PROMPT = random_prompt(40, 3)
SHAPES = [("llama", 1, 2), ("deepseek_v3", 2, 1), ("qwen3_next", 1, 2), ("qwen3", 2, 4), ("phi3", 2, 2),
          ("gpt_oss", 2, 2), ("nemotron_h", 1, 2), ("kimi_linear", 2, 1), ("qwen3_5", 2, 2)]  # fmt: skip


def adapters_of(oracle: Any, folder: Path, family: str, count: int = 2) -> list[Path]:
    targets = FAMILIES.get(family, FAMILIES["llama"])
    return [save_adapter(oracle, folder / str(seed), targets, seed=seed) for seed in range(1, 1 + count)]


@pytest.mark.gate("llama-1+2", "qwen3_next-1+2")
@pytest.mark.parametrize(
    ("family", "prefill", "decode"), SHAPES, ids=[f"{family}-{left}+{right}" for family, left, right in SHAPES]
)
def test_ranks_divide_an_adapter_as_they_divide_its_weights(
    family: str, prefill: int, decode: int, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    make_model(family, **sizes_for_ranks(family, max(prefill, decode))).save_pretrained(folder)
    oracle = load_oracle(folder)
    adapters = adapters_of(oracle, tmp_path, family)
    ranks = {"island.prefill_ranks": prefill, "island.decode_ranks": decode}
    with serving(folder, AdapterSettings(2, 4), ranks) as workers:
        digests = load_all(workers, adapters)
        for index, (adapter, digest) in enumerate(zip((*adapters, None), (*digests, b""), strict=True)):
            assert workers.generate(f"r{index}", PROMPT, digest) == expected(oracle, adapter, PROMPT)


def load_all(workers: Workers, adapters: list[Path]) -> list[bytes]:
    """Loads adapters into workers whose ranks hold as much of an adapter as they like."""
    digests = []
    for adapter in adapters:
        request = worker_pb2.LoadAdapterRequest(epoch=EPOCH, name=adapter.name, path=str(adapter))
        found = {stub.LoadAdapter(request, timeout=30).digest for stub in (workers.prefill, workers.decode)}
        digests.append(found.pop())
        assert not found, "both have the same digest"
    return digests


@pytest.mark.gate("llama-channel")
@pytest.mark.parametrize("case", CASES)
def test_an_adapter_adds_to_quantized_weights(case: str, tmp_path: Path) -> None:
    meant = save_quantized(case, tmp_path / "model")
    family, *_ = CASES[case]
    if family == "deepseek_v4":
        pytest.skip("no adapter can change it")
    plain = shutil.copytree(tmp_path / "model", tmp_path / "plain")
    save_checkpoint(family, plain)
    save_file({name: tensor.contiguous() for name, tensor in meant.items()}, plain / SINGLE, {"format": "pt"})
    oracle = load_oracle(plain)
    adapters = adapters_of(oracle, tmp_path, family)
    model = AdaptedModel(tmp_path / "model", adapters, slots=2, rank=4)
    for row, adapter in enumerate((0, 1, None)):
        model.add(row, adapter)
    firsts = model.in_chunks(dict.fromkeys(range(3), PROMPT), {})
    rest = model.steps(dict(enumerate(firsts)), 5)
    wanted = [expected(oracle, adapter, PROMPT) for adapter in (*adapters, None)]
    assert [[first, *row] for first, *row in zip(firsts, *rest, strict=True)] == wanted


@pytest.mark.long
@pytest.mark.parametrize("method", ["draft_model", "eagle3", "mtp"])
def test_the_bases_drafter_drafts_for_an_adapter(method: str, tmp_path: Path) -> None:
    """Other drafts than the adapter's would be, and the adapter's tokens."""
    folder = (make_mtp if method == "mtp" else make_llama)(tmp_path / "model")
    settings: dict[str, Any] = {"speculation.method": method, "speculation.tokens": 3, "model.dtype": "float32"}
    if method != "mtp":
        make = make_smaller if method == "draft_model" else make_head
        settings["speculation.draft"] = str(make(tmp_path / "draft", folder))
    oracle = load_oracle(folder)
    adapters = [save_adapter(oracle, tmp_path / str(seed), ("q_proj", "o_proj"), seed=seed) for seed in (1, 2)]
    with serving(folder, AdapterSettings(2, 4), settings) as workers:
        for index, (adapter, digest) in enumerate(zip(adapters, load_all(workers, adapters), strict=True)):
            assert workers.generate(f"r{index}", PROMPT, digest, 16) == expected(oracle, adapter, PROMPT, 16)
        assert workers.generate("base", PROMPT, b"", 16) == expected(oracle, None, PROMPT, 16)


def test_a_parked_request_goes_on_with_its_adapter(tmp_path: Path) -> None:
    """One slot: the adapter of the request that leaves gives way to the other's, and comes back."""
    folder, long = save_checkpoint("llama", tmp_path / "model"), random_prompt(20, 1)
    oracle = load_oracle(folder)
    adapters = adapters_of(oracle, tmp_path, "llama")
    pages = {"cache.num_pages": 20, "cache.parked_bytes": 8 << 20}
    with serving(folder, AdapterSettings(1, 4), pages) as workers:
        one, other = load_all(workers, adapters)
        reservation = workers.prepare("long", long, one, 100)
        first = workers.send("long", long, one, reservation, 100).first_token
        stream = workers.start("long", reservation, 100)
        found = [first, *next(stream).token_ids]
        urgent = prompt_message(PROMPT, adapter=other, priority=-1)
        ask = worker_pb2.PrepareReceiveRequest(request_id="r", epoch=EPOCH, prompt=urgent, max_tokens=6, parks=True)
        beside = workers.decode.PrepareReceive(ask, timeout=20)
        sent = workers.send("r", PROMPT, other, beside, 6).first_token
        rest = [token for message in workers.start("r", beside) for token in message.token_ids]
        assert [sent, *rest] == expected(oracle, adapters[1], PROMPT)
        found += [token for message in stream for token in message.token_ids]
        assert found == expected(oracle, adapters[0], long, 100)
        counters = workers.info(workers.decode).counters
        assert (counters.parks, counters.resumes) == (1, 1)
        workers.remove(one)
        assert [held.name for held in workers.info(workers.decode).adapters] == [adapters[1].name]


@pytest.mark.gate("without")
@pytest.mark.parametrize("prompts", [True, False], ids=["prompts", "without"])
def test_a_record_with_adapters_is_replayed(prompts: bool, tmp_path: Path) -> None:
    """Adapters are loaded, evicted and removed. A record without prompts finds the same prefixes."""
    folder, records = save_checkpoint("llama", tmp_path / "model"), tmp_path / "records"
    adapters = adapters_of(load_oracle(folder), tmp_path, "llama", 3)
    recorded = {"record.folder": str(records), "record.prompts": prompts}
    with serving(folder, AdapterSettings(2, 4), recorded) as workers:
        digests = load_all(workers, adapters)
        for turn, digest in enumerate([*digests, b"", *digests[::-1]]):
            workers.generate(f"r{turn}", PROMPT, digest)
        workers.remove(digests[1])
        workers.generate("last", PROMPT, digests[2])
    summary = replay_files(sorted(records.glob("*.tandemrec")))
    assert summary.difference is None
    assert summary.by_name["load_adapter"] == 6
    assert summary.prefix_hits >= 6


def test_log_probabilities_of_a_prompt_are_the_adapters(tmp_path: Path) -> None:
    folder = save_checkpoint("llama", tmp_path / "model")
    oracle = load_oracle(folder)
    (adapter,) = adapters_of(oracle, tmp_path, "llama", 1)
    model = AdaptedModel(folder, [adapter], slots=1, rank=4)
    model.add(0, 0)
    model.add(1, None)
    ids = np.array(PROMPT)
    scored = Scored(ids[1:], 1)
    _, found = model.runner.scored_prompts(PromptChunks([0, 1], [ids, ids], [40, 40]), [scored, scored], push=False)
    for one, own in zip(found, (adapter, None), strict=True):
        with merged(oracle, own) as changed, torch.inference_mode():
            logits = changed(torch.tensor([PROMPT])).logits[0, :-1].log_softmax(1)
        wanted = logits.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0].numpy()
        np.testing.assert_allclose(one.logprobs, wanted, atol=1e-4)
