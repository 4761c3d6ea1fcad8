"""Calls of web pages, as browsers make them: which origins may read answers, streams and errors."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.errors import ConfigError
from tests.cluster.open_gateway import BODY, OpenGateway, open_gateway
from tests.support.checkpoints import save_checkpoint
from tests.support.http_client import COMPLETIONS, get, post, refused

TOKEN = "a-token-of-enough-characters-to-be-taken"
PAGE = "https://chat.example"
ALLOWED = "access-control-allow-origin"
ASKS = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("cors"))


@pytest.fixture(scope="module")
def guarded(model: Path) -> Iterator[OpenGateway]:
    options = {"gateway.cors_origins": [PAGE, "http://localhost:3000"], "security.api_key": TOKEN}
    with open_gateway(model, options) as opened:
        yield opened


def ask(address: str, path: str, origin: str, headers: dict[str, str] = ASKS) -> httpx.Response:
    """A preflight, which carries no token."""
    url = f"http://{address}{path}"
    return httpx.options(url, headers={"origin": origin, **headers}, timeout=60, trust_env=False)


def test_a_page_of_a_listed_origin_may_ask_and_read(guarded: OpenGateway) -> None:
    asked = ask(guarded.http, COMPLETIONS, PAGE)
    assert (asked.status_code, asked.headers[ALLOWED], asked.content) == (200, PAGE, b"")
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert asked.headers["access-control-allow-headers"] == "authorization,content-type"
    headers = {"origin": PAGE, "authorization": f"Bearer {TOKEN}"}
    for stream in (False, True):
        answer = post(guarded.http, COMPLETIONS, {**BODY, "stream": stream}, headers=headers)
        assert (answer.status_code, answer.headers[ALLOWED], answer.headers["vary"]) == (200, PAGE, "origin")
        assert "x-request-id" in answer.headers["access-control-expose-headers"]


@pytest.mark.parametrize(("path", "status"), [(COMPLETIONS, 401), ("/v1/nothing", 401), ("/health", 200)])
def test_a_page_may_read_errors_too(guarded: OpenGateway, path: str, status: int) -> None:
    answer = get(guarded.http, path, headers={"origin": PAGE})
    assert (answer.status_code, answer.headers[ALLOWED]) == (status, PAGE)


@pytest.mark.parametrize("origin", ["https://other.example", "http://chat.example", f"{PAGE}.evil.example", "null"])
def test_other_pages_may_not(guarded: OpenGateway, origin: str) -> None:
    assert "gateway.cors_origins" in refused(ask(guarded.http, COMPLETIONS, origin), 403)["message"]
    answer = post(guarded.http, COMPLETIONS, BODY, headers={"origin": origin, "authorization": f"Bearer {TOKEN}"})
    assert (ALLOWED in answer.headers, answer.headers["vary"]) == (False, "origin")


def test_what_is_no_name_of_a_header(guarded: OpenGateway) -> None:
    for names in ("a" * 1025, "a: b"):
        asked = ask(guarded.http, COMPLETIONS, PAGE, {**ASKS, "access-control-request-headers": names})
        assert "access-control-request-headers is" in refused(asked, 400)["message"]


def test_all_pages(model: Path) -> None:
    with open_gateway(model, {"gateway.cors_origins": ["*"]}) as opened:
        assert ask(opened.http, COMPLETIONS, "https://any.example").headers[ALLOWED] == "*"
        answer = post(opened.http, COMPLETIONS, BODY, headers={"origin": "https://any.example"})
        assert (answer.status_code, answer.headers[ALLOWED]) == (200, "*")


def test_none_by_default(model: Path) -> None:
    with open_gateway(model) as opened:
        refused(ask(opened.http, COMPLETIONS, PAGE), 405)
        answer = post(opened.http, COMPLETIONS, BODY, headers={"origin": PAGE})
        assert not [name for name in answer.headers if name.startswith("access-control") or name == "vary"]


@pytest.mark.parametrize(
    "origin", ["chat.example", "https://chat.example/", "https://Chat.example", "https://*.example"]
)
def test_what_is_no_origin(origin: str) -> None:
    with pytest.raises(ConfigError, match=r"cors_origins\.0 is .*; it must be origins of web pages that may call"):
        load_config(None, {"gateway.cors_origins": [origin]})
