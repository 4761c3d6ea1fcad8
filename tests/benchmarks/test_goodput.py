"""Tests of the goodput benchmark's rates, timelines and roofs. A load of a small cluster is long."""

import json
import subprocess
import sys
import time
from array import array
from pathlib import Path

import numpy as np
import psutil
import pytest

from tandem.cluster.errors import BenchmarkFailed, UsageError
from tandem.cluster.tools.bench.mixes import MIXES, Slo
from tandem.cluster.tools.bench.timeline import Running, Timeline
from tests.benchmarks.goodput import compare_to_off, goodput_of, limit_of, read_rates, shares_of
from tests.benchmarks.model_shapes import write_shape
from tests.benchmarks.roofs import Roofs
from tests.benchmarks.vllm_servers import SHIPPED, running_vllm

ROOT = Path(__file__).resolve().parents[2]
H100 = Roofs(copy=3.35e12, product=680e12)
SERVER = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, *sys.argv[1:], flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.mark.parametrize(("mix", "rate"), [("A", 42), ("A2", 43), ("B", 5.7), ("C", 155)])
def test_the_limit_of_two_h100s_is_the_one_that_was_reckoned_by_hand(mix: str, rate: float, tmp_path: Path) -> None:
    assert limit_of(MIXES[mix], write_shape("qwen3-8b", tmp_path), H100, 2) == pytest.approx(rate, rel=0.1)


def test_steps_that_only_read_weights_leave_no_room(tmp_path: Path) -> None:
    """15.1 GB take 4.5 ms at 3.35 TB/s."""
    model = write_shape("qwen3-8b", tmp_path)
    slow = Roofs(copy=1e12, product=680e12)
    assert limit_of(MIXES["A"], model, slow, 1) == 0
    assert limit_of(MIXES["A"], model, H100, 4) == pytest.approx(2 * limit_of(MIXES["A"], model, H100, 2), rel=1e-3)


def test_goodput_lies_on_the_line_between_two_rates() -> None:
    assert goodput_of([30, 10, 20], [0.5, 1.0, 0.95], 0.9) == {"rps": pytest.approx(20 + 10 * 0.05 / 0.45, rel=1e-3)}
    assert goodput_of([10, 20], [0.9, 0.8], 0.9) == {"rps": 10}
    assert goodput_of([10, 20, 30], [1.0, 0.8, 1.0], 0.9) == {"rps": 15}  # the first rate that misses ends it


def test_a_goodput_beyond_what_was_measured_is_a_bound() -> None:
    assert goodput_of([10, 20], [1.0, 0.9], 0.9) == {"at_least": 20}
    assert goodput_of([20, 10], [0.1, 0.89], 0.9) == {"below": 10}


def timeline(first: float, *gaps: float, error: str | None = None) -> Timeline:
    running = Running(1 + len(gaps), 0.0, error=error, sent=5.0)
    running.arrivals = array("d", 5.0 + np.cumsum([first, *gaps]))
    return Timeline.of(running)


def test_both_rules_count_first_tokens_and_failures() -> None:
    steady, burst = [0.012] * 10, [0.004] * 8 + [0.02] * 2  # means 12 and 7.2 ms, p90 12 and 20 ms
    ones = [timeline(0.1, *steady), timeline(0.1, *burst), timeline(0.6, *burst), timeline(0.1, *burst, error="gone")]
    assert shares_of(ones, [Slo(500, 15), Slo(500, 10)]) == {
        "p90 gap 15 ms": 0.25,
        "mean gap 15 ms": 0.5,
        "p90 gap 10 ms": 0.0,
        "mean gap 10 ms": 0.25,
    }


def test_clusters_with_drafts_are_compared_to_that_without() -> None:
    def numbers(token_ms: float, rps: float) -> dict[str, dict]:
        return {"rates": {"4": {"token_ms": token_ms}}, "goodput": {"p90": {"rps": rps}, "mean": {"at_least": 4}}}

    targets = {"colocated off http": numbers(5.0, 20.0), "colocated ngram http": numbers(2.0, 19.0)}
    targets |= {"colocated ngram grpc": numbers(1.0, 1.0)}
    compare_to_off(targets)
    assert targets["colocated ngram http"] == {
        "rates": {"4": {"token_ms": 2.0, "token_to_off": 0.4}},
        "goodput": {"p90": {"rps": 19.0, "goodput_to_off": 0.95}, "mean": {"at_least": 4}},
    }
    assert targets["colocated off http"] == numbers(5.0, 20.0)
    assert targets["colocated ngram grpc"] == numbers(1.0, 1.0), "there is no such cluster without"


def test_rates_are_for_all_mixes_or_for_one() -> None:
    assert read_rates(["4", "A=18.5:23.3", "8"]) == {"": [4, 8], "A": [18.5, 23.3]}
    for wrong in ("D=4", "A=", "A=0", "x"):
        with pytest.raises(UsageError, match=r"A=18\.5:23\.3"):
            read_rates([wrong])


@pytest.fixture
def site(tmp_path: Path) -> Path:
    package = tmp_path / "site" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    (package / "api_server.py").write_text(SERVER)
    return tmp_path / "site"


def runs(pid: int) -> bool:
    """Returns whether the process runs, even as another's child. A zombie does not."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_servers_of_vllm_end_with_all_that_they_started(site: Path, tmp_path: Path) -> None:
    with running_vllm(site, tmp_path / "model", "320", 2, tmp_path) as urls:
        logs = [log.read_text().split() for log in sorted(tmp_path.glob("*.log"))]
        children = [int(words[1]) for words in logs]
        assert all(runs(child) for child in children)
    for url, words in zip(urls, logs, strict=True):
        assert words[words.index("--port") + 1] == url.rpartition(":")[2]
        assert words[words.index("--max-num-batched-tokens") + 1] == "320"
    until = time.monotonic() + 10
    while any(runs(child) for child in children):
        assert time.monotonic() < until, children
        time.sleep(0.05)


def test_a_server_of_vllm_that_ends_is_told(site: Path, tmp_path: Path) -> None:
    (site / "vllm" / "entrypoints" / "openai" / "api_server.py").write_text("raise SystemExit(3)")
    with (
        pytest.raises(BenchmarkFailed, match="exit code 3"),
        running_vllm(site, tmp_path, SHIPPED, 1, tmp_path),
    ):
        pass


@pytest.mark.long
def test_a_small_cluster_under_two_rates_through_both_frontends() -> None:
    arguments = ["--rates", "4", "12", "--window", "3", "--http", "--grpc", "--roles", "colocated", "--gap-ms", "60000"]
    arguments += ["--gpus", "0", "--shape", "tiny", "--mixes", "laptop", "--product-tflops", "1", "--copy-tbs", "0.1"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.goodput", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (laptop,) = json.loads(done.stdout)["mixes"].values()
    assert laptop["limit_rps"] > 0
    for frontend in ("http", "grpc"):
        target = laptop[f"colocated {frontend}"]
        assert [(run["requests"], run["failed"]) for run in target["rates"].values()] == [(12, 0), (36, 0)]
        for run in target["rates"].values():
            assert set(run["shares"]) == {"p90 gap 60000 ms", "mean gap 60000 ms"}
            assert 0 < run["first_token_p50_ms"] <= run["first_token_p90_ms"]
            assert 0 < run["gap_p50_ms"] <= run["gap_p99_ms"]
            assert run["output_tokens_s"] > 0
