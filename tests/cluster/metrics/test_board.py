"""The Grafana board and the alerts ask for what is there, and for all that docs/deploy.md tells to watch."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.cluster.cli.samples import Samples
from tandem.cluster.client import Client
from tandem.cluster.credentials import ClientSecurity
from tandem.cluster.metrics.cluster_series import worker_families
from tandem.cluster.scaling import ScalingState
from tests.cluster.open_gateway import PROMPT, TOKENS, open_gateway
from tests.support.checkpoints import save_checkpoint
from tests.support.promql import Query, Recording

ROOT = Path(__file__).resolve().parents[3]
BOARD = ROOT / "deploy" / "grafana" / "tandem.json"
PANELS: list[dict[str, Any]] = [one for one in json.loads(BOARD.read_text())["panels"] if one["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
MAY_BE_EMPTY = {"tandem:worker_token_seconds", "tandem:worker_bytes_pushed_total", "tandem:rejected_total"}
(ALERTS,) = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
RULES = {one["alert"]: one["expr"] for one in ALERTS["rules"]}
TOKEN = "an-operators-token"
OF_RANKS = "tandem:rank_up"  # which workers of one process have not
WATCH = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8").partition("### What to watch")[2].partition("\n##")[0]
WATCHED = re.findall(r"^\| (`.*?`) \|", WATCH, re.MULTILINE)
WORKER = '{island="i",pe="1",role="decode"}'
FIRES = {
    "TandemAbsent": "tandem:up 1 1",
    "TandemNotReady": "tandem:ready 1 0",
    "TandemStartsNothing": "tandem:starts_nothing 0 1",
    "TandemIslandDown": 'tandem:island_up{island="i"} 1 0',
    "TandemWorkerSilent": f"tandem:worker_up{WORKER} 1 0",
    "TandemRankStalled": 'tandem:rank_up{island="i",pe="1",role="decode",rank="1"} 1 0',
    "TandemIslandRestarts": 'tandem:island_restarts_total{island="i"} 2 8',
    "TandemGatewayRestarts": "tandem:gateway_restarts_total 0 6",
    "TandemIslandsMissing": "tandem:wanted_islands 2 3\ntandem:islands 2 2",
    "TandemQueueGrows": 'tandem:requests{stage="queued"} 1 9',
    "TandemPagesFull": "vllm:kv_cache_usage_perc 0.9 0.96",
    "TandemLateRoom": 'vllm:request_queue_time_seconds_bucket{le="2.0"} 0 8\n'
    'vllm:request_queue_time_seconds_bucket{le="5.0"} 0 10\nvllm:request_queue_time_seconds_bucket{le="+Inf"} 0 10',
    "TandemLateFirstTokens": 'vllm:time_to_first_token_seconds_bucket{le="5.0"} 0 8\n'
    'vllm:time_to_first_token_seconds_bucket{le="7.5"} 0 10\nvllm:time_to_first_token_seconds_bucket{le="+Inf"} 0 10',
    "TandemLateTokens": 'vllm:inter_token_latency_seconds_bucket{le="0.2"} 0 8\n'
    'vllm:inter_token_latency_seconds_bucket{le="0.5"} 0 10\nvllm:inter_token_latency_seconds_bucket{le="+Inf"} 0 10',
    "TandemTargetsMissed": 'tandem:first_token_targets_total{outcome="missed"} 0 2\n'
    'tandem:first_token_targets_total{outcome="met"} 0 8',
    "TandemFails": 'tandem:rejected_total{frontend="http",code="503"} 4 5',
    "TandemTurnsAway": 'tandem:rejected_total{frontend="http",code="429"} 0 3\nvllm:request_success_total 0 10',
    "TandemKeysFileStale": "tandem:keys_file_stale 0 1",
    "TandemReplays": 'tandem:replays_total{reason="lost"} 0 21',
    "TandemCorruptKv": f"tandem:worker_corrupt_total{WORKER} 0 1",
    "TandemBadHostPages": f"tandem:worker_host_bad_pages_total{WORKER} 0 1",
    "TandemExpiredLeases": f"tandem:worker_expired_leases_total{WORKER} 0 10",
}
"""Series with their values before and after a minute, for which each alert fires."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Before and after a few requests."""
    folder = tmp_path_factory.mktemp("gateway")
    keys = folder / "keys.yaml"
    keys.write_text("keys: []")
    options = {"security.keys_file": str(keys), "security.api_key": TOKEN}
    with open_gateway(save_checkpoint("llama", folder / "model"), options) as gateway:
        with Client(gateway.grpc, security=ClientSecurity(token=TOKEN)) as client:
            wish = ScalingState(min_islands=1, max_islands=2, wanted_islands=1, waits_for="")
            gateway.events.run(gateway.gateway.update_scaling(wish), timeout=10)
            texts = [client.metrics().text]
            for _ in range(3):
                list(client.generate(PROMPT, timeout=60, max_tokens=len(TOKENS)))
            while Samples(texts[-1]).total("vllm:request_success_total") < 3:
                texts.append(client.metrics().text)
        scrapes = [Samples(text) for text in texts]
        return Recording([float(number) for number in range(len(scrapes))], scrapes, len(scrapes))


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_expression_has_its_metrics_and_a_value(recorded: Recording, expression: str) -> None:
    query, last = Query(expression), recorded.times[-1]
    assert query.names
    assert query.names <= recorded.scrapes[-1].names
    assert query.at(recorded, last) or query.names <= MAY_BE_EMPTY


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_legend_has_its_labels(recorded: Recording, expression: str) -> None:
    legends = [one["legendFormat"] for panel in PANELS for one in panel["targets"] if one["expr"] == expression]
    for labels in Query(expression).at(recorded, recorded.times[-1]):
        names = {name for name, _ in labels}
        for legend in legends:
            assert {part.partition("}}")[0] for part in legend.split("{{")[1:]} <= names


def parts(selector: str) -> list[str]:
    """The alternatives of the regular expressions in it."""
    return [part for one in re.findall(r'=~"([^"]*)"', selector) for part in one.split("|")]


@pytest.mark.parametrize("name", RULES)
def test_no_alert_fires_for_a_cluster_that_is_well(recorded: Recording, name: str) -> None:
    query, scrape = Query(RULES[name]), recorded.scrapes[-1]
    assert query.names
    assert query.names <= scrape.names | {OF_RANKS}
    assert query.at(recorded, recorded.times[-1]) == {}
    codes = {labels["code"] for labels, _ in scrape.series("tandem:rejected_total")}
    for part in parts(RULES[name]):
        assert any(re.fullmatch(part, code) for code in codes), part


@pytest.mark.parametrize("name", RULES)
def test_each_alert_fires_for_what_it_is_about(name: str) -> None:
    series = [line.rsplit(" ", 2) for line in FIRES[name].splitlines()]
    scrapes = [Samples("".join(f"{one[0]} {one[number]}\n" for one in series)) for number in (1, 2)]
    fired = Query(RULES[name]).at(Recording([0.0, 60.0], scrapes, 300.0), 60.0)
    assert len(fired) == 1
    still = Recording([0.0, 60.0], [scrapes[0], scrapes[0]], 300.0)
    assert name == "TandemAbsent" or not Query(RULES[name]).at(still, 60.0)


@pytest.mark.parametrize("row", [row for row in WATCHED if row != "`metric`"])
def test_what_is_to_be_watched_is_drawn_and_has_an_alert(row: str) -> None:
    for metric in re.findall(r"`([\w:]+)`", row):
        asked = re.compile(rf"{metric}(_total|_bucket)?(?![\w:])")
        assert any(asked.search(expression) for expression in EXPRESSIONS), f"no panel has {metric}"
        assert any(asked.search(expression) for expression in RULES.values()), f"no alert has {metric}"


def test_alerts_say_what_is_wrong() -> None:
    assert len(RULES) == len(ALERTS["rules"])
    assert len(WATCHED) >= 10
    assert OF_RANKS in {family.name for family in worker_families([])}
    for rule in ALERTS["rules"]:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert {*rule["annotations"]} == {"summary", "description"}
        labels = set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
        kept = {name for names in re.findall(r"by \(([^)]*)\)", rule["expr"]) for name in names.split(", ")}
        assert labels <= kept, rule["alert"]


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(BOARD.read_text())["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)


@pytest.mark.parametrize(
    ("expression", "wanted"),
    [
        ("sum(rate(a_total[1m]))", {(): 3.0}),
        ('sum by (k) (a_total{k="x"})', {(("k", "x"),): 5.0}),
        ("sum(a_total) / 2 + 1", {(): 6.0}),
        ("min(a_total) > 4", {(): 5.0}),
        ("min(a_total) > 5", {}),
        ("min(a_total) == 5", {(): 5.0}),
        ('sum by (k) (increase(a_total[1m])) > 4 and sum by (k) (a_total{k="y"}) <= 5', {(("k", "y"),): 5.0}),
        ("max(delta(a_total[1m]))", {(): 4.0}),
        ("sum by (k) (a_total) >= sum by (k) (a_total)", {(("k", "x"),): 5.0, (("k", "y"),): 5.0}),
        ("absent(b_total)", {(): 1.0}),
        ("absent(a_total)", {}),
    ],
)
def test_expressions_mean_what_they_mean_to_prometheus(expression: str, wanted: dict[Any, float]) -> None:
    scrapes = [
        Samples(f'a_total{{k="x"}} {one}\na_total{{k="y"}} {other}\n') for one, other in ((1, 9), (4, 2), (5, 5))
    ]
    # x grew by 3 and 1; y began anew and grew by 2 and 3: 9 in 3 seconds.
    assert Query(expression).at(Recording([0.0, 1.0, 3.0], scrapes, 60.0), 3.0) == wanted


@pytest.mark.parametrize("expression", ["sum(", "rate(a)", "a b", "sum(a) &", "histogram_quantile(0.5)"])
def test_expressions_that_mean_nothing_are_refused(expression: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        Query(expression)
