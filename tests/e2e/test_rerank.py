"""/v1/score and /v1/rerank: the probabilities that transformers gives with Qwen3-Reranker's template."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.embedding_models import EOS, EmbeddingOracle, save_embedding_model
from tests.support.http_client import answer, post, refused
from tests.support.island import Island, running_island

QUERY = "which document has a yes?"
DOCUMENTS = ["yes", "no no no", "a document {query} with {braces}", "ß and 🙂 " * 30, ""]
SETTINGS = {"gateway.http_port": 0, "cache.num_pages": 512}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_embedding_model(tmp_path_factory.mktemp("reranker"), pooling=None, ends=False)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> EmbeddingOracle:
    return EmbeddingOracle(folder)


@pytest.fixture(scope="module")
def island(folder: Path) -> Iterator[Island]:
    with running_island(folder, SETTINGS) as island:
        yield island


def scores_of(body: dict[str, Any]) -> list[float]:
    assert [one["index"] for one in body["data"]] == list(range(len(body["data"])))
    return [one["score"] for one in body["data"]]


@pytest.mark.gate("/v1/score")
@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_scores_are_probabilities_of_yes(island: Island, oracle: EmbeddingOracle, path: str) -> None:
    """The second time the template and the query are found as a prefix."""
    expected = [oracle.score(QUERY, one) for one in DOCUMENTS]
    assert max(expected) - min(expected) > 0.01
    bodies = [answer(island.http, path, text_1=QUERY, text_2=DOCUMENTS) for _ in range(2)]
    for body in bodies:
        assert scores_of(body) == pytest.approx(expected, abs=1e-5)
    assert bodies[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    body = answer(island.http, path, queries=[QUERY, "no?"], documents=DOCUMENTS[:2])
    assert scores_of(body) == pytest.approx([expected[0], oracle.score("no?", DOCUMENTS[1])], abs=1e-5)
    assert scores_of(answer(island.http, path, text_1=QUERY, text_2=DOCUMENTS[0])) == pytest.approx(
        expected[:1], abs=1e-5
    )


@pytest.mark.gate("/v1/rerank")
@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_rankings_have_the_best_first(island: Island, oracle: EmbeddingOracle, path: str) -> None:
    expected = [oracle.score(QUERY, one, "find it") for one in DOCUMENTS]
    order = sorted(range(len(DOCUMENTS)), key=lambda index: -expected[index])
    documents = [DOCUMENTS[0], *({"text": one} for one in DOCUMENTS[1:])]
    body = answer(island.http, path, query=QUERY, documents=documents, instruction="find it")
    assert [one["index"] for one in body["results"]] == order
    assert [one["relevance_score"] for one in body["results"]] == pytest.approx([expected[i] for i in order], abs=1e-5)
    assert [one["document"]["text"] for one in body["results"]] == [DOCUMENTS[i] for i in order]
    few = answer(
        island.http, path, query=QUERY, documents=documents, instruction="find it", top_n=2, return_documents=False
    )
    assert [one["index"] for one in few["results"]] == order[:2]
    assert not any("document" in one for one in few["results"])


def test_documents_are_cut_and_nothing_else(island: Island, oracle: EmbeddingOracle) -> None:
    whole, long = "no yes " * 5, "no yes " * 1200
    size = len(oracle.tokens(" " + whole[:-1])) + 1
    assert size < 30
    cut = answer(island.http, "/v1/rerank", query=QUERY, documents=["yes", long], max_tokens_per_doc=6)
    assert {one["index"] for one in cut["results"]} == {0, 1}
    kept = oracle.tokenizer.decode(oracle.tokens(" " + long)[:6])
    best = {one["index"]: one["relevance_score"] for one in cut["results"]}
    assert best[1] == pytest.approx(oracle.score(QUERY, kept[1:]), abs=1e-5)
    error = refused(post(island.http, "/v1/rerank", {"query": QUERY, "documents": ["yes", long]}), 400)
    assert "documents[1]" in error["message"]
    body = answer(island.http, "/v1/rerank", query=QUERY, documents=["yes", long], truncate_prompt_tokens=-1)
    assert body["usage"]["prompt_tokens"] < 2 * 2048 + 1


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/score", {"text_1": "a"}, ["text_2", "documents"]),
        ("/v1/score", {"text_1": "a", "queries": "b", "text_2": "c"}, ["text_1", "queries"]),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, ["text_1", "2", "1"]),
        ("/v1/score", {"text_1": "a", "text_2": []}, ["text_2"]),
        ("/v1/rerank", {"query": "a"}, ["documents", "missing"]),
        ("/v1/rerank", {"query": "a", "documents": []}, ["documents"]),
        ("/v1/rerank", {"query": "a", "documents": [3]}, ["documents[0]", "3"]),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "priority": 99}, ["priority", "99"]),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, ["top_n", "-1"]),
        (
            "/v1/rerank",
            {"query": "a", "documents": ["b"], "truncate_prompt_tokens": 5},
            ["truncate_prompt_tokens", "5"],
        ),
        ("/v1/rerank", {"query": "a", "documents": ["b"] * 3000}, ["documents", "3000", "2048"]),
    ],
)
def test_what_is_refused(island: Island, path: str, body: dict[str, Any], named: list[str]) -> None:
    error = refused(post(island.http, path, body), 400)
    assert all(part in error["message"] for part in named), error


@pytest.mark.long
def test_a_template_of_another_model(folder: Path, oracle: EmbeddingOracle) -> None:
    template = "{instruction} {query}: {document}?"
    settings = {"embeddings.score_template": template, "embeddings.score_tokens": ["a", "b"]}
    with running_island(folder, SETTINGS | settings | {"embeddings.score_instruction": "say"}) as island:
        (score,) = scores_of(answer(island.http, "/v1/score", text_1="q", text_2="d"))
    import torch

    model: Any = oracle.model
    with torch.inference_mode():
        logits = model(torch.tensor([oracle.tokens("say q: d?")])).logits[0, -1]
    good, bad = (oracle.tokenizer.convert_tokens_to_ids(one) for one in "ab")
    assert score == pytest.approx(float(torch.sigmoid(logits[good] - logits[bad])), abs=1e-5)


def test_tokens_that_the_model_lacks_are_named(folder: Path) -> None:
    with running_island(folder, SETTINGS | {"embeddings.score_tokens": ["affirmative", "no"]}) as island:
        error = refused(post(island.http, "/v1/score", {"text_1": "a", "text_2": "b"}), 400)
        assert "affirmative" in error["message"]
        assert EOS not in error["message"]
