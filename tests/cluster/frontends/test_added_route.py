"""A route that is added to the table gets what all routes have: the token, limits, errors, ids and its description."""

from collections.abc import Iterator
from typing import Any

import pytest

from tandem.cluster.errors import InvalidRequest
from tandem.cluster.frontends.http.errors import HttpError
from tandem.cluster.frontends.http.reply import Receive, Reply, Scope
from tandem.cluster.frontends.openai.body_object import BodyObject
from tandem.cluster.frontends.openai.read_body import read_object
from tandem.cluster.gateway import gateway
from tandem.cluster.peers.table import Column
from tests.cluster.open_gateway import OpenGateway, open_gateway
from tests.support.checkpoints import save_checkpoint
from tests.support.http_client import get, post, refused

TOKEN = "0123456789abcdef" * 2
PATH = "/added"


class AddedBody(BodyObject):
    """POST /added."""

    says: str


async def serve(scope: Scope, receive: Receive, reply: Reply) -> None:
    body, _ = read_object(AddedBody, (await receive())["body"])
    if body.says == "no":
        raise HttpError(400, "says is 'no'; it must be something else", param="says")
    if body.says == "never":
        raise InvalidRequest("says is 'never'")
    if body.says == "fail":
        raise RuntimeError("a defect")
    await reply.whole(200, {"says": body.says})


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenGateway]:
    folder = tmp_path_factory.mktemp("added")
    (folder / "token").write_text(TOKEN)
    (folder / "token").chmod(0o600)
    api_routes = gateway.api_routes

    def with_one_more(*args: Any, **options: Any) -> Any:
        routes = api_routes(*args, **options)
        routes[PATH] = (("POST",), serve)
        return routes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gateway, "api_routes", with_one_more)
        options = {"security.token_file": str(folder / "token"), "gateway.max_calls": 1}
        with open_gateway(save_checkpoint("llama", folder / "model"), options) as one:
            yield one


def call(opened: OpenGateway, says: Any, **headers: str) -> Any:
    return post(opened.http, PATH, {"says": says}, headers={"authorization": f"Bearer {TOKEN}", **headers})


def test_it_answers_under_the_clients_id(opened: OpenGateway) -> None:
    response = call(opened, "hello", **{"x-request-id": "mine"})
    assert (response.status_code, response.json()) == (200, {"says": "hello"})
    assert response.headers["x-request-id"] == "mine"


def test_it_asks_for_the_token(opened: OpenGateway) -> None:
    refused(post(opened.http, PATH, {"says": "hello"}), 401)


def test_its_errors_have_the_form_of_all(opened: OpenGateway, caplog: pytest.LogCaptureFixture) -> None:
    assert refused(call(opened, "no"), 400)["param"] == "says"
    assert "never" in refused(call(opened, "never"), 400)["message"]
    assert "says" in refused(call(opened, 7), 400)["message"]
    assert "a defect" not in refused(call(opened, "fail"), 500)["message"]
    assert f"a call of '{PATH}' failed" in caplog.text


def test_it_takes_its_methods_alone(opened: OpenGateway) -> None:
    response = get(opened.http, PATH, headers={"authorization": f"Bearer {TOKEN}"})
    refused(response, 405)
    assert response.headers["allow"] == "POST"


def test_it_counts_among_the_calls(opened: OpenGateway) -> None:
    calls = opened.gateway._limit._table
    calls.add(Column.CALLS, 1)
    assert "gateway.max_calls is 1" in refused(call(opened, "hello"), 429)["message"]
    calls.add(Column.CALLS, -1)
    assert call(opened, "hello").status_code == 200


def test_it_is_described(opened: OpenGateway) -> None:
    described = get(opened.http, "/openapi.json", headers={"authorization": f"Bearer {TOKEN}"}).json()
    assert [*described["paths"][PATH]] == ["post"]
    assert PATH in refused(get(opened.http, "/x", headers={"authorization": f"Bearer {TOKEN}"}), 404)["message"]
