"""Embeddings through HTTP and gRPC: they equal transformers' to 1e-5, however they are computed."""

import asyncio
import base64
import io
import json
import logging
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from tandem.cluster.cli.commands import main
from tandem.cluster.cli.replayed_workers import replay_files
from tandem.cluster.client import AsyncClient
from tandem.cluster.errors import CallError, DeadlineExceeded, InvalidRequest, Overloaded
from tandem.cluster.llm import LLM
from tests.e2e.test_adaptive import in_graphs
from tests.support.checkpoints import save_checkpoint
from tests.support.client_requests import GREEDY, complete, tokens_of
from tests.support.embedding_models import (
    PROMPTS,
    EmbeddingOracle,
    Floats,
    loop_of,
    save_embedding_model,
    write_modules,
)
from tests.support.encoder_models import save_t5gemma
from tests.support.http_client import answer, get, post, refused
from tests.support.island import Island, running_island
from tests.support.likely_drafters import make_llama, make_mtp
from tests.support.oracle import greedy, load_oracle, random_prompt
from tests.support.waiting import until

__all__ = ["in_graphs"]  # a fixture

PATH = "/v1/embeddings"
TEXTS = ["a", "the query of a document", "yes, no " * 40, "ß and 🙂", "no"]
IDS = [random_prompt(length, seed=length, vocab_size=300) for length in (1, 2, 41, 90, 300)]
SETTINGS = {"gateway.http_port": 0, "cache.num_pages": 512}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_embedding_model(tmp_path_factory.mktemp("embedding"))


@pytest.fixture(scope="module")
def oracle(folder: Path) -> EmbeddingOracle:
    return EmbeddingOracle(folder)


@pytest.fixture(scope="module")
def island(folder: Path) -> Iterator[Island]:
    with running_island(folder, SETTINGS) as island:
        yield island


def run_command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)


def over_http(island: Island, **body: object) -> Floats:
    data = answer(island.http, PATH, **body)["data"]
    assert [one["index"] for one in data] == list(range(len(data)))
    return np.array([one["embedding"] for one in data], np.float32)


def same(found: Floats, expected: Floats) -> None:
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_batches_of_unlike_lengths_over_both_protocols(island: Island, oracle: EmbeddingOracle) -> None:
    """The second time workers have the prefixes."""
    for inputs in (TEXTS, IDS, TEXTS[:1], IDS[:1]):
        expected = oracle.embed(inputs)
        for _ in range(2):
            same(over_http(island, input=inputs), expected)
            with island.client() as client:
                same(client.embed(inputs).values, expected)
    with island.client() as client:
        assert client.embed(IDS).usage.cached_tokens > 300
        one = client.embed(IDS[2])
    same(one.values, oracle.embed(IDS[2:3]))
    assert one.usage.prompt_tokens == 41


@pytest.mark.gate("False")
@pytest.mark.parametrize("tied", [True, False])
def test_models_that_are_stored_without_a_head(tied: bool, tmp_path: Path) -> None:
    """Qwen3-Embedding is published so: no name of a tensor has a prefix."""
    folder = save_embedding_model(tmp_path, published=True, tie_word_embeddings=tied)
    with running_island(folder, SETTINGS) as island:
        same(over_http(island, input=TEXTS), EmbeddingOracle(folder).embed(TEXTS))


@pytest.mark.gate("gemma3")
@pytest.mark.parametrize(
    "family", ["qwen3", "gemma3", "llama", "gpt_oss", "deepseek_v3", "qwen3_moe", "qwen3_next", "nemotron_h", "llama4"]
)
def test_families_however_a_prompt_is_cut(family: str, tmp_path: Path) -> None:
    """Without files for sentence-transformers an embedding is the last token's hidden state, of length 1. The second
    time workers have the prefixes, and streams run at the same time."""
    folder = save_checkpoint(family, tmp_path)
    oracle: Any = load_oracle(folder)
    inputs = [random_prompt(length, seed=length) for length in (1, 2, 41, 90, 200)]
    with torch.inference_mode():
        hidden = [oracle.model(torch.tensor([one])).last_hidden_state[0].numpy() for one in inputs]
    tokens = greedy(oracle, inputs[2], 24)
    for chunk, pooling in ((7, "auto"), (64, "auto"), (64, "mean")):
        rows = [one.mean(0) if pooling == "mean" else one[-1] for one in hidden]
        expected = np.stack([row / np.linalg.norm(row) for row in rows])
        settings = {"scheduler.max_batch_tokens": chunk, "embeddings.pooling": pooling}
        with running_island(folder, settings) as island, island.client() as client, ThreadPoolExecutor(4) as pool:
            for _ in range(2):
                beside = [pool.submit(complete, island.address, inputs[2], max_tokens=24, **GREEDY) for _ in range(2)]
                same(client.embed(inputs).values, expected)
                assert [tokens_of(one.result()) for one in beside] == [tokens] * 2
            until(lambda: all(one.cache.pages.free == one.cache.pages.total for one in island.workers))


def test_means_compute_all_tokens(tmp_path: Path) -> None:
    """Workers have prefixes from the first time on, but do not use them: their hidden states are not kept."""
    folder = save_embedding_model(tmp_path, pooling="mean", normalizes=False)
    oracle = EmbeddingOracle(folder)
    with running_island(folder, SETTINGS) as island, island.client() as client:
        for _ in range(2):
            found = client.embed(IDS)
            same(found.values, oracle.embed(IDS, mean=True, normalizes=False))
            assert found.usage.cached_tokens == 0


@pytest.mark.long
def test_prompts_that_the_mean_leaves_out(tmp_path: Path) -> None:
    folder = save_embedding_model(tmp_path, pooling="mean", include_prompt=False)
    oracle = EmbeddingOracle(folder)
    skipped = len(oracle.tokens(PROMPTS["query"])) - 1  # without EOS
    with running_island(folder, SETTINGS | {"scheduler.max_batch_tokens": 8}) as island:
        found = over_http(island, input=TEXTS, prompt_name="query")
        same(found, oracle.embed(TEXTS, mean=True, prompt=PROMPTS["query"], skipped=skipped))
        same(over_http(island, input=TEXTS), oracle.embed(TEXTS, mean=True))


def test_prompts_by_name_and_as_texts(island: Island, oracle: EmbeddingOracle) -> None:
    same(over_http(island, input=TEXTS, prompt_name="query"), oracle.embed(TEXTS, prompt=PROMPTS["query"]))
    same(over_http(island, input=TEXTS, prompt="find: "), oracle.embed(TEXTS, prompt="find: "))
    with island.client() as client:
        same(client.embed(TEXTS, prompt_name="query").values, oracle.embed(TEXTS, prompt=PROMPTS["query"]))


def test_the_command_reads_texts_and_lines(
    island: Island,
    oracle: EmbeddingOracle,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lines are sent in several calls, and keep their numbers."""
    for texts, given in ((TEXTS, TEXTS), ([], [])):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{text}\n" for text in TEXTS)))
        options = ["--address", island.address, "--batch", "2", "--dimensions", "17", "--prompt-name", "query"]
        run_command("embed", *given, *options)
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [line["index"] for line in lines] == list(range(len(TEXTS))), texts
        expected = oracle.embed(TEXTS, dimensions=17, prompt=PROMPTS["query"])
        same(np.array([line["embedding"] for line in lines], np.float32), expected)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("a", "--dimensions", "99999"), "--dimensions is 99999; it must be from 1 to "),
        (("a", "--prompt-name", "nobody"), "--prompt-name is 'nobody'"),
        (("a", "b", "a" * 9999, "--batch", "2"), "texts 2 … 2: inputs[0] has "),
        ((), "no text: give texts as arguments, or one on each line of stdin"),
    ],
)
def test_the_command_names_what_was_wrong(
    arguments: tuple[str, ...],
    said: str,
    island: Island,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert run_command("embed", *arguments, "--address", island.address) == 2
    assert said in capsys.readouterr().err


def test_fewer_dimensions_have_length_1(island: Island, oracle: EmbeddingOracle) -> None:
    for normalizes in (True, False):
        expected = oracle.embed(TEXTS, dimensions=17, normalizes=normalizes)
        same(over_http(island, input=TEXTS, dimensions=17, normalize=normalizes), expected)
        with island.client() as client:
            same(client.embed(TEXTS, dimensions=17, normalize=normalizes).values, expected)


def test_base64_has_the_same_bits(island: Island) -> None:
    body = answer(island.http, PATH, input=TEXTS, encoding_format="base64", user="somebody")
    decoded = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in body["data"]]
    assert np.array_equal(np.stack(decoded), over_http(island, input=TEXTS))
    assert body["object"] == "list"
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] > len(TEXTS)


@pytest.mark.long
def test_long_inputs_are_cut_as_asked(island: Island, oracle: EmbeddingOracle) -> None:
    """Texts keep their first tokens and EOS, token ids the last ones."""
    same(over_http(island, input=TEXTS, truncate_prompt_tokens=9), oracle.embed(TEXTS, most=9))
    cut = [one[-9:] for one in IDS]
    same(over_http(island, input=IDS, truncate_prompt_tokens=9), oracle.embed(cut))
    long = "yes, no " * 5000  # read and tokenized in a process of its own
    same(over_http(island, input=[long, "no"], truncate_prompt_tokens=-1), oracle.embed([long, "no"], most=2048))


@pytest.mark.long
def test_many_inputs_of_several_clients(island: Island, oracle: EmbeddingOracle) -> None:
    """They are more inputs than a worker's call takes, over both workers' protocols."""
    inputs = [random_prompt(1 + number % 23, seed=number, vocab_size=300) for number in range(300)]
    expected = oracle.embed(inputs)

    async def every() -> list[Floats]:
        async with AsyncClient(island.address) as client:
            return [one.values for one in await asyncio.gather(*(client.embed(inputs) for _ in range(3)))]

    for found in asyncio.run(every()):
        same(found, expected)
    with LLM(island.address) as llm:
        same(llm.embed(inputs[0]).values, expected[:1])


@pytest.mark.long
@pytest.mark.parametrize("method", ["mtp", "ngram"])
def test_beside_drafts(method: str, tmp_path: Path) -> None:
    """A head keeps its own layer's KV of prompts that are read, which become prefixes for others."""
    folder = make_mtp(tmp_path) if method == "mtp" else make_llama(tmp_path)
    oracle: Any = load_oracle(folder)
    inputs = [random_prompt(length, seed=length) for length in (3, 40, 90)]
    with torch.inference_mode():
        rows = [oracle.model(torch.tensor([one])).last_hidden_state[0, -1].numpy() for one in inputs]
    expected = np.stack([row / np.linalg.norm(row) for row in rows])
    tokens = greedy(oracle, inputs[2], 16)
    settings = {"speculation.method": method, "scheduler.max_batch_tokens": 16}
    with running_island(folder, settings) as island, island.client() as client:
        for _ in range(2):
            same(client.embed(inputs).values, expected)
            assert tokens_of(complete(island.address, inputs[2], max_tokens=16, **GREEDY)) == tokens


@pytest.mark.long
def test_two_prefill_workers_share_the_work(folder: Path, oracle: EmbeddingOracle) -> None:
    settings = {"island.num_prefill": 2, "scheduler.max_batch_tokens": 32, "cache.prefix_sharing": False}
    with running_island(folder, SETTINGS | settings) as island, island.client() as client:
        same(client.embed(IDS * 4).values, oracle.embed(IDS * 4))
        prefills = [one for one in island.workers if one.config.role == "prefill"]
        assert all(one.on_step_thread(lambda one=one: loop_of(one).prefills.computed_tokens) for one in prefills)


@pytest.mark.gate("colocated")
@pytest.mark.parametrize("roles", ["adaptive", "colocated"])
def test_workers_of_any_role(roles: str, folder: Path, oracle: EmbeddingOracle) -> None:
    settings = {"scheduler.roles": roles, "island.num_prefill": 0 if roles == "colocated" else 1}
    with running_island(folder, SETTINGS | settings) as island:
        same(over_http(island, input=TEXTS), oracle.embed(TEXTS))


@pytest.mark.long
@pytest.mark.usefixtures("in_graphs")
def test_beside_steps_and_prompts_in_graphs(folder: Path, oracle: EmbeddingOracle) -> None:
    expected = greedy(oracle.model, IDS[2], 24)
    with running_island(folder, SETTINGS | {"scheduler.roles": "adaptive"}) as island, ThreadPoolExecutor(4) as pool:
        for _ in range(2):
            beside = [pool.submit(complete, island.address, IDS[2], max_tokens=24, **GREEDY) for _ in range(3)]
            same(over_http(island, input=IDS), oracle.embed(IDS))
            assert [tokens_of(one.result()) for one in beside] == [expected] * 3


@pytest.mark.long
def test_ranks_of_a_worker(folder: Path, oracle: EmbeddingOracle) -> None:
    with running_island(folder, SETTINGS | {"island.prefill_ranks": 2}) as island:
        for _ in range(2):
            same(over_http(island, input=IDS), oracle.embed(IDS))


def test_a_record_has_them(folder: Path, tmp_path: Path) -> None:
    """A replay gives the same pages. Prompts are not in the record."""
    with running_island(folder, SETTINGS | {"record.folder": str(tmp_path)}) as island:
        over_http(island, input=IDS)
        complete(island.address, IDS[1], max_tokens=4, **GREEDY)
        over_http(island, input=IDS)
    files = sorted(tmp_path.glob("*.tandemrec"))
    assert b"read_out" in files[0].read_bytes()
    assert replay_files(files).by_name["read_out"] > 2


def is_idle(island: Island) -> bool:
    return all(
        one.on_step_thread(lambda one=one: (loop_of(one).num_waiting, loop_of(one).num_running)) == (0, 0)
        and one.cache.pages.free == one.cache.pages.total
        for one in island.workers
    )


def test_clients_that_leave_stop_the_work(folder: Path, oracle: EmbeddingOracle) -> None:
    """Clients leave while prompts wait in the gateway and at the worker, and while they are computed."""
    inputs = [random_prompt(400, seed=number, vocab_size=300) for number in range(60)]
    settings = {"cache.prefix_sharing": False, "scheduler.max_batch_tokens": 16}
    with running_island(folder, SETTINGS | settings) as island:
        worker, whole = island.workers[0], sum(map(len, inputs))

        async def leave() -> None:
            async with AsyncClient(island.address) as client:
                calls = [asyncio.ensure_future(client.embed(inputs)) for _ in range(2)]
                await asyncio.to_thread(until, lambda: loop_of(worker).prefills.computed_tokens > 1000)
                for call in calls:
                    call.cancel()
                await asyncio.wait(calls)

        asyncio.run(leave())
        until(lambda: is_idle(island))
        assert loop_of(worker).prefills.computed_tokens < whole
        with island.client() as client, pytest.raises(DeadlineExceeded):
            client.embed(inputs, timeout=0.3)
        until(lambda: is_idle(island))
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"http://{island.http}{PATH}", json={"input": inputs}, timeout=0.3, trust_env=False)
        until(lambda: is_idle(island))
        links = island.gateway._islands.links().values()
        assert all((link.load, link.has_prompts) == (0, False) for link in links)
        same(over_http(island, input=IDS), oracle.embed(IDS))


def test_prompts_of_streams_keep_nobody_out(island: Island, oracle: EmbeddingOracle) -> None:
    """However many of their tokens wait at the worker: there they take turns, and not in the gateway."""
    links = [link for link in island.gateway._islands.links().values() if link.role == "prefill"]
    for link in links:
        link.expect_prompt("a long prompt of another request", 1 << 20)
    try:
        same(over_http(island, input=IDS), oracle.embed(IDS))
    finally:
        for link in links:
            link.forget_prompt("a long prompt of another request")


def test_pages_are_free_when_a_prefix_cannot_be_published(
    folder: Path, oracle: EmbeddingOracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that was computed to its end fails then, and so do the others of its forward."""
    with running_island(folder, SETTINGS) as island:
        engine, failures = loop_of(island.workers[0]).engine, [RuntimeError("out of luck")]
        publish = engine.publish

        def fails_once(*arguments: Any) -> None:
            if failures:
                raise failures.pop()
            publish(*arguments)

        monkeypatch.setattr(engine, "publish", fails_once)
        same(over_http(island, input=IDS), oracle.embed(IDS))
        assert not failures
        until(lambda: is_idle(island))


def test_a_failed_forward_is_tried_again_and_a_broken_model_is_named(
    folder: Path, oracle: EmbeddingOracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_island(folder, SETTINGS) as island:
        engine, failures = loop_of(island.workers[0]).engine, [RuntimeError("out of luck")]
        read_out = engine.read_out

        def fails_once(*arguments: Any) -> Any:
            if failures:
                raise failures.pop()
            return read_out(*arguments)

        monkeypatch.setattr(engine, "read_out", fails_once)
        same(over_http(island, input=IDS), oracle.embed(IDS))

        def breaks(*arguments: Any) -> Any:
            pooled = read_out(*arguments)
            return pooled._replace(hidden=np.full_like(pooled.hidden, np.nan))

        monkeypatch.setattr(engine, "read_out", breaks)
        error = refused(post(island.http, PATH, {"input": IDS}), 500)
        assert "not finite" in error["message"]
        until(lambda: is_idle(island))


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, ["input", "missing"]),
        ({"input": []}, ["input", "empty"]),
        ({"input": [[]]}, ["input", "empty"]),
        ({"input": ["a", 3]}, ["input[1]", "3"]),
        ({"input": [[1, 2], [3, "x"]]}, ["input[1][1]", "x"]),
        ({"input": [[1], []]}, ["input[1]", "0 "]),
        ({"input": [5, 320]}, ["input[0]", "320", "0 … 319"]),
        ({"input": [-1]}, ["input[0]", "-1"]),
        ({"input": list(range(3)) * 683}, ["input[0]", "2049", "from 1 to 2048"]),
        ({"input": "a", "dimensions": 0}, ["dimensions", "0"]),
        ({"input": "a", "dimensions": 65}, ["dimensions", "65", "from 1 to 64"]),
        ({"input": "a", "encoding_format": "int8"}, ["encoding_format", "int8", "base64"]),
        ({"input": "a", "truncate_prompt_tokens": 0}, ["truncate_prompt_tokens", "0"]),
        ({"input": "a", "prompt_name": "other"}, ["prompt_name", "other", "document, query"]),
        ({"input": "a", "prompt_name": "query", "prompt": "b"}, ["prompt_name", "prompt"]),
        ({"input": [3], "prompt_name": "query"}, ["prompt_name", "input 0", "token ids"]),
        ({"input": "a", "priority": 99}, ["priority", "99", "from 0 to 10"]),
        ({"input": ["a"] * 9}, ["input", "9", "embeddings.max_inputs"]),
        ({"input": [[3] * 2000] * 3}, ["input", "6000", "embeddings.max_tokens"]),
        ({"input": "a", "dimension": 3}, ["dimension", "dimensions"]),
        ({"input": "a", "model": "other"}, ["other"]),
    ],
)
def test_what_is_refused(bounded: Island, body: dict[str, Any], named: list[str]) -> None:
    error = refused(post(bounded.http, PATH, body), 404 if "model" in body else 400)
    assert all(part in error["message"] for part in named), error


@pytest.fixture(scope="module")
def bounded(folder: Path) -> Iterator[Island]:
    with running_island(folder, SETTINGS | {"embeddings.max_inputs": 8, "embeddings.max_tokens": 5000}) as island:
        yield island


def test_refusals_over_grpc_name_the_field(bounded: Island) -> None:
    with bounded.client() as client:
        for inputs, options, named in (
            ([], {}, "inputs has 0 entries"),
            ("a", {"dimensions": 65}, "dimensions is 65"),
            ([[400]], {}, "inputs[0] has token 400"),
            ([1.5], {}, "inputs[0] is 1.5"),
            ("a", {"colour": 3}, "colour"),
        ):
            with pytest.raises(InvalidRequest, match=named.replace("[", r"\[").replace("]", r"\]")):
                client.embed(inputs, **options)  # type: ignore[arg-type]


def test_a_queue_has_an_end(folder: Path) -> None:
    settings = {"gateway.max_queued": 1, "scheduler.max_batch_tokens": 8, "cache.prefix_sharing": False}
    inputs = [random_prompt(150, seed=number, vocab_size=300) for number in range(10)]

    async def ask(client: AsyncClient) -> str:
        try:
            await client.embed(inputs)
        except CallError as error:
            return type(error).__name__
        return ""

    async def storm(address: str) -> list[str]:
        async with AsyncClient(address) as client:
            return await asyncio.gather(*(ask(client) for _ in range(8)))

    with running_island(folder, SETTINGS | settings) as island:
        ends = asyncio.run(storm(island.address))
        assert set(ends) == {"", Overloaded.__name__}
        until(lambda: is_idle(island))


def test_models_with_an_encoder_are_refused_by_name(tmp_path: Path) -> None:
    save_t5gemma(tmp_path)
    with running_island(tmp_path, {"gateway.http_port": 0}) as island:
        error = refused(post(island.http, PATH, {"input": [5, 6]}), 400)
        assert "T5GemmaForConditionalGeneration" in error["message"]
        assert "encoder" in error["message"]


@pytest.mark.gate("cls*")
@pytest.mark.parametrize(
    ("pooling", "fields", "named"),
    [("cls", {}, "the pooling is cls"), ("lasttoken", {"is_causal": False}, "is_causal false")],
)
def test_other_poolings_and_attention_are_refused(
    pooling: str, fields: dict[str, Any], named: str, tmp_path: Path
) -> None:
    folder = save_embedding_model(tmp_path)
    write_modules(folder, pooling, normalizes=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    with running_island(folder, SETTINGS) as island:
        assert named in refused(post(island.http, PATH, {"input": "a"}), 400)["message"]


def test_usage_metrics_and_the_access_log(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running_island(folder, SETTINGS | {"logging.access": True}) as island:
        with caplog.at_level(logging.INFO, "tandem.cluster.tracing.access_log"):
            usage = answer(island.http, PATH, input=IDS)["usage"]
            (line,) = [one for one in caplog.records if one.getMessage() == "request"]
        assert usage["prompt_tokens"] == sum(map(len, IDS))
        assert vars(line)["fields"]["prompt_tokens"] == usage["prompt_tokens"]
        assert vars(line)["fields"]["status"] == "stop"
        text = get(island.http, "/metrics").text
        counts = {one.split()[0].partition("{")[0]: one.split()[1] for one in text.splitlines() if one[:1] != "#"}
        assert float(counts["vllm:prompt_tokens_total"]) == usage["prompt_tokens"]
        assert "/v1/embeddings" in get(island.http, "/openapi.json").json()["paths"]
