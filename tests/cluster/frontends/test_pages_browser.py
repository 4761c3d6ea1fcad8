"""The pages in a browser: a cluster without load, with load, with a dead island; keys; names that look like HTML."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.frontends.openai import openapi
from tandem.cluster.routing.membership import IslandState
from tests.cluster.open_gateway import BODY, TOKENS, OpenGateway, open_gateway
from tests.support.browser import Tab, needs_browser, open_tab
from tests.support.http_client import COMPLETIONS, answer, get, post

pytestmark = [pytest.mark.long, needs_browser]

TOKEN = "a-token-of-enough-characters-to-be-taken"
NAME = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Tab]:
    with open_tab() as tab:
        yield tab


@pytest.fixture
def tab(browser: Tab) -> Iterator[Tab]:
    """Yields a tab, whose scripts must do nothing that is refused, and call nobody but the gateway."""
    browser.complaints.clear()
    browser.asked.clear()
    yield browser
    assert browser.complaints == []
    assert len({url.split("/")[2] for url in browser.asked if not url.startswith("data:")}) == 1
    browser.open("about:blank")


def update(gateway: OpenGateway, state: IslandState) -> None:
    gateway.events.run(gateway.gateway.update_island(state), timeout=10)


def test_load_and_a_dead_island(tab: Tab, folder: Path) -> None:
    with open_gateway(folder, alone=True) as gateway, ThreadPoolExecutor(3) as pool:
        tab.open(f"http://{gateway.http}/")
        tab.until("#ready", "not ready")
        tab.until("#banner", "starting")
        tab.until("#islands", "none")
        asked = [pool.submit(answer, gateway.http, COMPLETIONS, **BODY) for _ in range(3)]
        tab.until("#cards", "3\nwaiting")
        gateway.island_comes()
        tab.until("#ready", "ready")
        assert [one.result(60)["choices"][0]["token_ids"] for one in asked] == [TOKENS] * 3
        tab.until("#islands", "serves", "shared_memory")
        assert tab.text("#banner") == ""
        workers = tab.until("#workers", "up")
        assert workers.count("32 of 64") == 2  # as the workers say
        tab.until("#tiers", "device", "64\t128\t50 %")
        tab.until("#cards", "0\nwaiting", "50 %", "first token, p90 (p50", " ms)")
        points = tab.run("document.querySelector('#tokens .one').getAttribute('points')").split()
        assert min(float(point.split(",")[1]) for point in points) < 10  # there is a peak

        post(gateway.http, COMPLETIONS, {**BODY, "prompt": []})
        tab.until("#errors", "400 (http)")
        update(gateway, IslandState("i", 1, 1, (), version=2))
        tab.until("#islands", "starting again")
        tab.until("#banner", "no island has a prefill and a decode worker")
        tab.until("#errors", "restarts of islands\t1")
        update(gateway, gateway.worker.state("i", epoch=2, version=3))
        tab.until("#islands", "serves")
        gateway.events.run(gateway.worker.stop(), timeout=10)
        tab.until("#islands", "2 lost")
        tab.until("#workers", "lost")
    tab.until("#banner", "does not answer")
    assert "2 lost" in tab.text("#islands")  # what was last known stays


def test_the_key_is_asked_for_and_kept_in_the_tab(tab: Tab, folder: Path) -> None:
    with open_gateway(folder, {"security.api_key": TOKEN}) as gateway:
        tab.open(f"http://{gateway.http}/")
        tab.until("#why", "asks for a key")
        assert tab.text("main") == ""
        tab.type("#secret", "a wrong key")
        tab.until("#why", "does not accept")
        tab.type("#secret", TOKEN)
        tab.until("#islands", "serves")
        assert tab.text("#key") == ""
        assert tab.run("location.href") == f"http://{gateway.http}/"
        assert tab.run("localStorage.length") == 0
        assert TOKEN not in tab.run("document.documentElement.outerHTML + document.cookie")
        tab.open(f"http://{gateway.http}/docs")
        tab.until("main", "/v1/chat/completions")
        tab.run("document.querySelector('#forget').click()")
        tab.until("#why", "asks for a key")
        assert tab.text("main") == ""
        assert not any(TOKEN in url for url in tab.asked)


def test_names_stay_text(tab: Tab, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openapi, "description", lambda routes, bodies: DOCUMENT)
    with open_gateway(folder, {"model.served_model_name": NAME}) as gateway:
        tab.open(f"http://{gateway.http}/")
        tab.until("#about", NAME)
        assert tab.run(IMAGES) == 0
        assert tab.run("document.title") != "taken"
        tab.open(f"http://{gateway.http}/docs")
        tab.until("main", f"POST{NAME}")
        assert NAME in tab.text("#about")
        tab.run("document.querySelector('details').open = true")
        shown = tab.until("main", "curl")
        assert shown.count(NAME) == 4  # the path, in a command, too, and the field with its description
        assert tab.run(IMAGES) == 0
        assert tab.run("document.title") == "API of tandem"


def test_the_page_of_the_api_has_each_route_and_field(tab: Tab, folder: Path) -> None:
    with open_gateway(folder) as gateway:
        described: dict[str, Any] = get(gateway.http, "/openapi.json").json()
        tab.open(f"http://{gateway.http}/docs")
        tab.until("main", *described["paths"])
        for _ in range(4):  # schemas within schemas
            tab.run("document.querySelectorAll('details').forEach((one) => (one.open = true))")
            tab.run("new Promise((done) => setTimeout(done, 200))")
        shown = tab.text("main")
        codes = {*tab.run("[...document.querySelectorAll('code')].map((one) => one.textContent)")}
        for schema in ("CompletionBody", "ChatBody", "MessagesBody", "ResponsesBody"):
            (name,) = [one for one in described["components"]["schemas"] if one.endswith(schema)]
            assert {*described["components"]["schemas"][name]["properties"]} <= codes
        (line,) = [one for one in shown.splitlines() if one.endswith("'") and '"prompt"' in one]
        example = json.loads(line.partition("-d '")[2].removesuffix("'"))
        assert (
            post(gateway.http, COMPLETIONS, {**example, "prompt": BODY["prompt"], "max_tokens": 2}).status_code == 200
        )


def test_metrics_on_another_port_are_not_missed(tab: Tab, folder: Path) -> None:
    with open_gateway(folder, {"metrics.port": 0}) as gateway:
        tab.open(f"http://{gateway.http}/")
        tab.until("#islands", "serves")
        tab.until("#errors", "metrics.port")
        assert tab.text("#api") == "API"
        tab.asked.clear()
        tab.open(f"http://{gateway.gateway._addresses.metrics}/")
        tab.until("#errors", "none so far")
        assert tab.text("#api") == ""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_readable(tab: Tab, folder: Path, scheme: str) -> None:
    """In both schemes text contrasts with its background by 4.5 to 1, as WCAG asks."""
    with open_gateway(folder) as gateway:
        tab.colors(scheme)
        tab.open(f"http://{gateway.http}/")
        tab.until("#islands", "serves")
        assert tab.run(CONTRASTS) == []
        tab.resize(390, 800)
        assert tab.run("document.documentElement.scrollWidth") <= 390  # wide tables scroll by themselves
        tab.resize(1200, 1000)


FIELD = {"type": "string", "description": NAME}
BODY_OF_NAMES = {"content": {"application/json": {"schema": {"properties": {NAME: FIELD}}}}}
DOCUMENT = {
    "info": {"title": "tandem", "version": NAME},
    "paths": {NAME: {"post": {"requestBody": BODY_OF_NAMES, "responses": {}}}},
    "components": {"schemas": {}},
}
IMAGES = "document.querySelectorAll('img').length"

CONTRASTS = """(() => {
  const parts = (color) => color.match(/[\\d.]+/g).slice(0, 3).map((one) => {
    const part = one / 255;
    return part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  const light = (color) => parts(color).reduce((sum, part, index) => sum + part * [0.2126, 0.7152, 0.0722][index], 0);
  const behind = (node) => {
    const color = getComputedStyle(node).backgroundColor;
    return color !== "rgba(0, 0, 0, 0)" ? color : behind(node.parentElement);
  };
  const faint = [];
  for (const node of document.querySelectorAll("h1, h2, span, td, th, a, div")) {
    if (!node.offsetParent || ![...node.childNodes].some((one) => one.nodeType === 3 && one.data.trim())) continue;
    const [low, high] = [light(getComputedStyle(node).color), light(behind(node))].sort((a, b) => a - b);
    if ((high + 0.05) / (low + 0.05) < 4.5) faint.push(`${node.className}: ${node.textContent}`);
  }
  return [...new Set(faint)];
})()"""
