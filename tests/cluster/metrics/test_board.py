"""The Grafana board asks for nothing that is not there."""

import json
from typing import Any

import pytest

from tandem.cluster.cli.samples import Samples
from tandem.cluster.client import Client
from tests.board.draw import BOARD
from tests.cluster.open_gateway import PROMPT, TOKENS, open_gateway
from tests.support.checkpoints import save_checkpoint
from tests.support.client_requests import complete
from tests.support.promql import Query, Recording

PANELS: list[dict[str, Any]] = [one for one in json.loads(BOARD.read_text())["panels"] if one["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
MAY_BE_EMPTY = {"tandem:worker_token_seconds", "tandem:worker_bytes_pushed_total", "tandem:rejected_total"}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Before and after a few requests."""
    with open_gateway(save_checkpoint("llama", tmp_path_factory.mktemp("gateway"))) as gateway:
        with Client(gateway.grpc) as client:
            texts = [client.metrics().text]
            for _ in range(3):
                complete(gateway.grpc, PROMPT, max_tokens=len(TOKENS))
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
