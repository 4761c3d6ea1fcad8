"""/openapi.json: it describes the routes that there are, and schemas that the bodies keep to."""

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tandem.cluster.frontends.openai.chats import ChatBody
from tandem.cluster.frontends.openai.completions import CompletionBody
from tests.cluster.open_gateway import BODY, OpenGateway, open_gateway
from tests.support.checkpoints import save_checkpoint
from tests.support.http_client import COMPLETIONS, get, post, refused

SCHEMAS = "#/components/schemas/"


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenGateway]:
    with open_gateway(save_checkpoint("llama", tmp_path_factory.mktemp("openapi"))) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def document(opened: OpenGateway) -> dict[str, Any]:
    return get(opened.http, "/openapi.json").json()


def schema(document: dict[str, Any], path: str) -> dict[str, Any]:
    """Returns the schema of the body that a route takes."""
    reference = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    return document["components"]["schemas"][reference.removeprefix(SCHEMAS)]


def test_each_route_is_there_with_its_methods(opened: OpenGateway, document: dict[str, Any]) -> None:
    assert document["openapi"].startswith("3.1")
    named = {path for path in document["paths"] if path.startswith("/v1/models/")}
    assert {"/health", "/ready", "/metrics", "/load", "/openapi.json", "/v1/models", COMPLETIONS} < {*document["paths"]}
    for path in {*document["paths"]} - named:
        for method in ("GET", "POST", "HEAD"):
            answered = httpx.request(method, f"http://{opened.http}{path}", timeout=60, trust_env=False)
            assert (answered.status_code != 405) == (method.lower() in document["paths"][path]), (path, method)
    listed = refused(get(opened.http, "/nothing"), 404)["message"]
    assert {*re.findall(r"(/[\w./-]*)[ ,]", listed.partition(";")[2])} - named == {*document["paths"]} - named


def test_each_body_is_described(document: dict[str, Any]) -> None:
    bodiless = {"/ping"}
    for path, operations in document["paths"].items():
        assert ("requestBody" in operations.get("post", {})) == ("post" in operations and path not in bodiless), path
    for kind, path in ((CompletionBody, COMPLETIONS), (ChatBody, "/v1/chat/completions")):
        assert {*schema(document, path)["properties"]} == {*kind.model_fields}
        assert "text/event-stream" in document["paths"][path]["post"]["responses"]["200"]["content"]


def test_each_part_of_a_path_is_described(document: dict[str, Any]) -> None:
    operations = [(path, one) for path, methods in document["paths"].items() for one in methods.values()]
    for path, operation in operations:
        described = {one["name"] for one in operation.get("parameters", ()) if one["in"] == "path" and one["required"]}
        assert described == {*re.findall(r"{(\w+)}", path)}, path
    assert any("parameters" in operation for _, operation in operations)


def test_references_have_ends(document: dict[str, Any]) -> None:
    ends = {f"{SCHEMAS}{name}" for name in document["components"]["schemas"]}
    assert {*re.findall(rf"{SCHEMAS}\w+", str(document))} <= ends


def test_errors_have_the_form_that_is_described(opened: OpenGateway, document: dict[str, Any]) -> None:
    (error,) = document["components"]["schemas"]["Error"]["properties"].values()
    assert error["required"] == [*refused(post(opened.http, COMPLETIONS, {}), 400)]


def test_unknown_fields_are_allowed_where_they_are_taken(opened: OpenGateway, document: dict[str, Any]) -> None:
    assert "additionalProperties" not in schema(document, COMPLETIONS)
    assert "additionalProperties" not in document["components"]["schemas"]["Message"]
    assert post(opened.http, COMPLETIONS, {**BODY, "colour": "red"}).status_code == 200
    assert document["components"]["schemas"]["StructuredOutputs"]["additionalProperties"] is False
    refused(post(opened.http, COMPLETIONS, {**BODY, "structured_outputs": {"colour": "red"}}), 400)


def test_it_is_made_once(opened: OpenGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    first = get(opened.http, "/openapi.json").content
    monkeypatch.setattr("tandem.cluster.frontends.openai.openapi.description", None)
    assert get(opened.http, "/openapi.json").content == first
