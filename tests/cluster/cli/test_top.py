"""`tandem top` against a gateway whose workers answer as the test says, and its arithmetic."""

import json
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import generate_latest

from tandem.cluster.cli import commands as cli
from tandem.cluster.cli.samples import Interval, Samples
from tandem.cluster.metrics.quantile import quantile
from tandem.cluster.scaling import ScalingState
from tests.cluster.open_gateway import PROMPT, TOKENS, OpenGateway, open_gateway
from tests.support.checkpoints import save_checkpoint
from tests.support.client_requests import complete

BOUNDS = (0.1, 0.2, 0.5, 1.0)


@pytest.fixture(autouse=True)
def _own_runtime_folder(runtime_folder: Path) -> None:
    """No test sees the user's clusters."""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenGateway]:
    with open_gateway(save_checkpoint("llama", tmp_path_factory.mktemp("gateway"))) as opened:
        complete(opened.grpc, PROMPT, max_tokens=len(TOKENS))
        yield opened


def top(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(["top", "--interval", "0.5", *arguments])
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


def test_once_in_json(gateway: OpenGateway, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = top(capsys, "--once", "--json", "--address", gateway.grpc)
    view = json.loads(out)
    assert code == 0
    assert view["ready"]
    assert (view["queued"], view["in_prefill"], view["in_decode"], view["rejected"]) == (0, 0, 0, 0)
    assert len(view["first_token_seconds"]) == len(view["gap_seconds"]) == 3
    assert [(one["alive"], one["pages"], one["used_pages"]) for one in view["workers"]] == [(True, 64, 32)] * 2
    assert [one["host"] for one in view["workers"]] == ["127.0.0.1"] * 2


def test_once_as_a_table(gateway: OpenGateway, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = top(capsys, "--once", "--address", gateway.grpc)
    assert code == 0
    assert "ready" in out
    assert "32/64" in out
    assert "output tokens/s" in out.replace("\n", " ")


def test_what_the_scaling_policy_waits_for(gateway: OpenGateway, capsys: pytest.CaptureFixture[str]) -> None:
    def told(*state: object) -> str:
        gateway.events.run(gateway.gateway.update_scaling(ScalingState(1, 4, *state)), timeout=10)  # type: ignore[arg-type]
        return " ".join(top(capsys, "--once", "--address", gateway.grpc)[1].split())

    assert "1 islands of 3 wanted: waiting for hosts" in told(3, "waiting for hosts with room for 2 of them")
    assert "wanted" not in told(1)


def test_clusters_that_are_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no such cluster" in top(capsys, "nobody")[2]
    code, _, error = top(capsys, "--once", "--address", "127.0.0.1:1")
    assert code == 1
    assert "127.0.0.1:1" in error
    assert top(capsys, "local", "--address", "127.0.0.1:1")[0] == 2


def scrape(at: float, count: float, values: list[float]) -> Samples:
    registry = CollectorRegistry()
    Counter("c", "About.", registry=registry).inc(count)
    histogram = Histogram("h", "About.", buckets=BOUNDS, registry=registry)
    for value in values:
        histogram.observe(value)
    return Samples(generate_latest(registry).decode() + f"tandem:uptime_seconds {at}\n")


def test_a_counter_that_began_anew_grew_from_nothing() -> None:
    assert Interval(scrape(10, 8, []), scrape(14, 20, [])).rate("c_total") == 3
    assert Interval(scrape(10, 8, []), scrape(14, 2, [])).rate("c_total") == 0.5
    assert Interval(scrape(10, 8, []), scrape(10, 8, [])).rate("c_total") == 0


def test_percentiles_are_those_of_the_interval_or_of_all() -> None:
    before, after = scrape(1, 0, [0.05] * 9), scrape(2, 0, [0.05] * 9 + [0.3])
    assert Interval(before, after).quantiles("h", (0.5,)) == [pytest.approx(0.35)]
    assert Interval(after, after).quantiles("h", (0.5,))[0] < 0.1
    assert Interval(scrape(1, 0, []), scrape(2, 0, [])).quantiles("h", (0.5,)) == []


@given(st.lists(st.integers(0, 50), min_size=4, max_size=4).filter(any), st.floats(0.01, 1))
def test_a_quantile_lies_in_the_bucket_that_has_it(counts: list[int], fraction: float) -> None:
    total = list(accumulate(counts))
    found = quantile(dict(zip((*BOUNDS, float("inf")), [*map(float, total), float(total[-1])], strict=True)), fraction)
    values = np.repeat((0.1, 0.2, 0.5, 1.0), counts)  # each at its bucket's upper end
    wanted = np.quantile(values, fraction, method="inverted_cdf")
    index = BOUNDS.index(float(wanted))
    assert (0.0, *BOUNDS)[index] <= found <= wanted + 1e-9
