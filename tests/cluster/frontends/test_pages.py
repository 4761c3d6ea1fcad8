"""The pages at / and /docs, and /status: who may have them, what browsers are told, and what they read."""

import asyncio
import base64
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from google.protobuf.json_format import ParseDict

from tandem.cluster.cli.samples import Samples
from tandem.cluster.client import Client
from tandem.cluster.credentials import ClientSecurity
from tandem.cluster.frontends.pages import page
from tandem.cluster.metrics.cluster_series import gateway_families, island_families, worker_families
from tandem.cluster.peers.table import Column
from tandem.proto import inference_pb2
from tests.cluster.open_gateway import OpenGateway, open_gateway
from tests.support.http_client import get, refused

TOKEN = "a-token-of-enough-characters-to-be-taken"
KEY = {"authorization": f"Bearer {TOKEN}"}
FOLDER = Path(page.__file__).parent
SCRIPTS = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.js")}
PAGES = [page.STATUS_PAGE, page.DOCS_PAGE]
SVG = "http://www.w3.org/2000/svg"  # a name, which nobody asks for
PARSES = (
    "innerHTML",
    "outerHTML",
    "insertAdjacentHTML",
    "document.write",
    "eval(",
    "Function(",
    "srcdoc",
    "javascript:",
)


@pytest.fixture(scope="module")
def opened(folder: Path) -> Iterator[OpenGateway]:
    options = {"security.api_key": TOKEN, "metrics.port": 0, "model.served_model_name": "a-secret-name"}
    with open_gateway(folder, options) as gateway:
        yield gateway


def monitor(opened: OpenGateway) -> str:
    return opened.gateway._addresses.metrics or ""


@pytest.mark.parametrize("path", PAGES)
def test_a_page_needs_no_key_and_tells_nothing(opened: OpenGateway, path: str) -> None:
    for headers in ({}, KEY, {"authorization": "Bearer wrong"}, {"host": "tandem.example"}):
        answer = get(opened.http, path, headers=headers)
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert answer.content == asyncio.run(content_of(path))  # whatever the gateway serves
    assert not {"a-secret-name", TOKEN} & set(re.findall(r"[\w-]+", answer.text))


async def content_of(path: str) -> bytes:
    sent: list[bytes] = []

    class Kept:
        async def content(self, status: int, content: bytes, media_type: str, headers: dict[str, str]) -> None:
            sent.append(content)

    kept: Any = Kept()
    await page.pages(*PAGES, metrics=False)[path]({}, kept, kept)
    return sent[0]


@pytest.mark.parametrize("path", PAGES)
def test_a_page_runs_its_own_script_alone_and_asks_nobody_else(opened: OpenGateway, path: str) -> None:
    answer = get(opened.http, path)
    policy = dict(one.split(" ", 1) for one in answer.headers["content-security-policy"].split("; "))
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy.pop(f"{tag}-src") == f"'sha256-{digest}'"
        assert answer.text.count(f"<{tag}") == 1
    assert policy.pop("connect-src") == "'self'"
    assert policy.pop("img-src") == "data:"
    assert policy.pop("require-trusted-types-for") == "'script'"
    assert policy == dict.fromkeys(("default-src", "base-uri", "form-action", "frame-ancestors"), "'none'")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert {*re.findall(r"(?:https?:)?//[\w.]+[^\s\"']*", answer.text)} <= {SVG}
    assert not re.findall(r"\son\w+=|\sstyle=", answer.text)


def test_nothing_is_parsed_as_html() -> None:
    assert {*SCRIPTS} == {"common.js", "docs.js", "status.js"}
    assert not [(name, word) for name, text in SCRIPTS.items() for word in PARSES if word in text]


def test_the_status_needs_the_key(opened: OpenGateway) -> None:
    for address in (opened.http, monitor(opened)):
        refused(get(address, "/status"), 401)
        refused(get(address, "/status", headers={"authorization": "Bearer wrong"}), 401)
        assert get(address, "/status", headers=KEY).status_code == 200


def test_the_status_is_that_of_grpc(opened: OpenGateway) -> None:
    answer = get(opened.http, "/status", headers=KEY)
    assert answer.headers["cache-control"] == "no-store"
    said = ParseDict(answer.json(), inference_pb2.ClusterInfo())
    with Client(opened.grpc, security=ClientSecurity(token=TOKEN)) as client:
        wanted = client.cluster_info()
    for one in (said, wanted):
        one.ClearField("uptime_seconds")
        one.gateways[0].ClearField("calls")
    assert said == wanted
    assert len(answer.json()["islands"][0]["workers"]) == 2


def test_foreign_names_get_no_status(folder: Path) -> None:
    """No key guards it here, as for all routes."""
    with open_gateway(folder) as gateway:
        assert get(gateway.http, "/status").status_code == 200
        assert get(gateway.http, "/", headers={"host": "tandem.example"}).status_code == 200
        refused(get(gateway.http, "/status", headers={"host": "tandem.example"}), 421)


def test_the_port_of_metrics_has_the_status_page(opened: OpenGateway) -> None:
    here, there = (get(address, "/").text for address in (monitor(opened), opened.http))
    assert here.replace("<body data-metrics>", "<body data-docs>") == there
    refused(get(monitor(opened), "/docs", headers=KEY), 404)


def test_pages_are_read_alone(opened: OpenGateway) -> None:
    for path in PAGES:
        head = httpx.head(f"http://{opened.http}{path}", timeout=60, trust_env=False)
        assert (head.status_code, head.content) == (200, b"")
        posted = httpx.post(f"http://{opened.http}{path}", timeout=60, trust_env=False)
        assert (posted.status_code, posted.headers["allow"]) == (405, "GET, HEAD")


def test_they_answer_a_gateway_that_is_full(opened: OpenGateway) -> None:
    limit = opened.gateway._limit
    limit._table.add(Column.CALLS, limit._most)
    try:
        refused(get(opened.http, "/v1/models", headers=KEY), 429)
        assert get(opened.http, "/").status_code == 200
        assert get(opened.http, "/status", headers=KEY).status_code == 200
    finally:
        limit._table.add(Column.CALLS, -limit._most)


def test_many_readers_ask_each_worker_once(folder: Path) -> None:
    answers = ["go on"] * 100
    with open_gateway(folder, fails={"GetStatus": answers}) as gateway:

        async def many() -> list[int]:
            async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
                asked = [client.get(f"http://{gateway.http}/status") for _ in range(20)]
                return [one.status_code for one in await asyncio.gather(*asked)]

        assert asyncio.run(many()) == [200] * 20
        assert 80 < len(answers) <= 98


def test_the_script_reads_metrics_that_exist(opened: OpenGateway) -> None:
    scrape = Samples(get(monitor(opened), "/metrics", headers=KEY).text)
    families = [*gateway_families(inference_pb2.ClusterInfo()), *island_families([]), *worker_families([])]
    known = scrape.names | {one.name for one in families} | {f"{one.name}_total" for one in families}
    read = {*re.findall(r'"((?:vllm|tandem):\w+)"', SCRIPTS["status.js"])}
    assert len(read) > 8
    assert {name for name in read if name not in known and f"{name}_bucket" not in known} == set()
