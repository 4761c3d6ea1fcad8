"""`tandem bench serve` through the command line, on an island of this process: it says what was served."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.cli.commands import main
from tandem.cluster.config.cluster_config import ClusterConfig
from tandem.cluster.tools import embedded
from tests.support.island import Island, running_island

SHORT = ["--prompt-tokens", "uniform:8:24", "--output-tokens", "uniform:2:6", "--vocab-size", "400"]
QUICK = [*SHORT, "--rate", "40", "--requests", "20", "--warmup-seconds", "0.1", "--tail-seconds", "0.1"]
LENIENT = ["--slo-ttft-ms", "60000", "--slo-gap-ms", "60000"]
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def island(small_model: Path) -> Iterator[Island]:
    with running_island(small_model, {"gateway.http_port": 0, "cache.num_pages": 1024}) as running:
        yield running


def serve(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "serve", *arguments])
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out, printed.err


def results(capsys: Capture, *arguments: str) -> dict[str, Any]:
    code, printed, told = serve(capsys, *arguments, "--json", "--processes", "1")
    assert code == 0, told
    return json.loads(printed)


def address(island: Island, kind: str) -> list[str]:
    return ["--grpc", island.address] if kind == "grpc" else ["--url", f"http://{island.http}"]


def test_both_targets_are_sent_the_same(island: Island, capsys: Capture) -> None:
    runs = []
    for kind, backend, salt in (("grpc", "tandem", "a"), ("url", "openai", "")):
        result = results(capsys, *address(island, kind), *QUICK, *LENIENT, "--salt", salt)
        assert result["backend"] == backend
        runs += result["runs"]
    for run in runs:
        assert (run["completed"], run["failed"], run["num_prompts"], run["slo_attainment"]) == (20, 0, 20, 1.0)
        assert 20 * 8 <= run["total_input_tokens"] <= 20 * 24
        assert 20 * 2 <= run["total_output_tokens"] <= 20 * 6
        assert 0 < run["median_ttft_ms"] <= run["p99_ttft_ms"] <= run["p99_e2el_ms"]
        assert run["median_itl_ms"] > 0
        assert run["request_goodput"] == run["request_throughput"] > 0
    for name in ("total_input_tokens", "total_output_tokens"):
        assert runs[0][name] == runs[1][name]


@pytest.mark.gate("grpc")
@pytest.mark.parametrize("kind", ["grpc", "url"])
def test_chats_send_what_was_answered(island: Island, capsys: Capture, kind: str) -> None:
    """Otherwise the pages of a history would not be found again."""
    chats = [*QUICK, "--turns", "4", "--prefix", "32", "--prompt-tokens", "fixed:16", "--output-tokens", "fixed:9"]
    (run,) = results(capsys, *address(island, kind), *chats, "--seed", {"grpc": "11", "url": "12"}[kind])["runs"]
    assert (run["completed"], run["num_prompts"], run["failed"]) == (20, 20, 0)
    prompts = [32 + 16 + turn * 25 for turn in range(4)]
    assert run["total_input_tokens"] == 5 * sum(prompts)
    assert run["total_reusable_tokens"] == 5 * (32 + sum(48 + 25 * turn - 16 - 1 for turn in range(1, 4)))
    whole_pages = 5 * (32 + sum((48 + 25 * turn - 17) // 8 * 8 for turn in range(1, 4)))
    assert whole_pages * 0.7 <= run["total_cached_tokens"] <= run["total_reusable_tokens"]


def test_chats_as_text(island: Island, capsys: Capture) -> None:
    arguments = ["--endpoint", "chat", *QUICK, "--turns", "2", "--prefix", "20", *LENIENT]
    (run,) = results(capsys, *address(island, "url"), *arguments)["runs"]
    assert (run["completed"], run["failed"], run["num_prompts"]) == (20, 0, 20)
    assert run["total_cached_tokens"] > 0


def test_a_trace(island: Island, capsys: Capture, tmp_path: Path) -> None:
    lines = [
        {"timestamp": 20 * at, "input_length": 600 - at, "output_length": 3, "hash_ids": [0, at]} for at in range(8)
    ]
    lines.append({"timestamp": 5, "input_length": 1 << 19, "output_length": 3, "hash_ids": []})
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    arguments = ["--trace", str(path), "--vocab-size", "400", *LENIENT]
    result = results(capsys, *address(island, "grpc"), *arguments)
    (run,) = result["runs"]
    assert (result["left_out"], run["completed"]) == (1, 8)
    assert run["total_input_tokens"] == sum(600 - at for at in range(8))
    assert run["total_reusable_tokens"] == 7 * 512
    assert run["total_cached_tokens"] <= run["total_reusable_tokens"]


@pytest.mark.long
def test_several_servers_get_requests_in_turns(island: Island, capsys: Capture) -> None:
    urls = ["--url", f"http://{island.http}", "--url", f"http://localhost:{island.http.rpartition(':')[2]}/v1"]
    (run,) = results(capsys, *urls, *QUICK, *LENIENT, "--seed", "21")["runs"]
    assert (run["completed"], run["failed"]) == (20, 0)


def test_a_mix_says_how_requests_arrive_unless_it_is_asked_for(island: Island, capsys: Capture) -> None:
    runs = [
        results(capsys, *address(island, "grpc"), "--mix", "bursty", *QUICK, *LENIENT, *more)["runs"][0]
        for more in ([], ["--burstiness", "2"])
    ]
    assert [run["burstiness"] for run in runs] == [0.25, 2.0]


@pytest.mark.long
def test_processes_share_a_load(island: Island, capsys: Capture, tmp_path: Path) -> None:
    output = tmp_path / "out" / "serve.json"
    arguments = [*address(island, "grpc"), *QUICK, *LENIENT, "--processes", "2", "--output", str(output)]
    code, printed, told = serve(capsys, *arguments)
    assert code == 0, told
    (run,) = json.loads(output.read_text())["runs"]
    assert (run["completed"], run["failed"]) == (20, 0)
    assert "offered /s" in printed


@pytest.mark.long
def test_an_arrival_beyond_the_bound_fails_and_is_not_delayed(island: Island, capsys: Capture) -> None:
    arguments = [*address(island, "grpc"), *QUICK, "--rate", "2000", "--max-concurrency", "2", *LENIENT]
    runs = results(capsys, *arguments)["runs"]
    assert [run["completed"] + run["failed"] for run in runs] == [20, 20]
    assert runs[1]["failed"] > 0
    assert list(runs[1]["errors"]) == ["more than --max-concurrency 2 under way"]
    assert runs[1]["max_concurrent_requests"] == 2
    assert runs[1]["slo_attainment"] == runs[1]["completed"] / 20


@pytest.mark.long
def test_a_sweep_with_a_plot(island: Island, capsys: Capture, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "serve.png"
    arguments = [*SHORT, "--sweep", "--rate", "20", "--requests", "20", "--warmup-seconds", "0", "--precision", "0.5"]
    arguments += ["--slo-ttft-ms", "0.001", "--budget-seconds", "6", "--plot", str(plot)]
    code, printed, told = serve(capsys, *address(island, "grpc"), *arguments)
    assert code == 0, told
    assert "goodput: none; no rate kept the SLO" in printed
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "stopped early" in told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--mix", "D"], "--mix is 'D'; it must be one of A, A2, B, C, bursty, mixed, laptop"),
        (["--rate", "0"], "--rate is 0; it must be above 0"),
        (["--rate", "nan"], "--rate is nan; it must be above 0"),
        (["--burstiness", "0"], "--burstiness is 0; it must be above 0"),
        (["--output-tokens", "many"], "--output-tokens is 'many'; it must be fixed:TOKENS, uniform:LOW:HIGH"),
        (["--grpc", "a:1", "--url", "http://b"], "give --grpc HOST:PORT, --url URL, or neither"),
        (["--endpoint", "chat", "--grpc", "a:1"], "--endpoint is chat; it needs --url"),
        (["--url", "ftp://a"], "--url is 'ftp://a'; it must be like http://127.0.0.1:8000"),
        (["--trace", "/nonexistent"], "--trace /nonexistent: "),
    ],
)
def test_bad_options_name_what_is_accepted(capsys: Capture, arguments: list[str], told: str) -> None:
    code, printed, error = serve(capsys, *arguments)
    assert (code, printed) == (2, "")
    assert error.startswith(f"tandem: {told}")
    assert error.count("\n") == 1


@pytest.mark.long
def test_servers_that_refuse(island: Island, capsys: Capture) -> None:
    code, _, told = serve(capsys, "--url", f"http://{island.http}", *QUICK, "--model-name", "other")
    assert (code, "--model-name is 'other'; ['" in told) == (1, True)
    code, _, told = serve(capsys, "--url", "http://127.0.0.1:1", *QUICK)
    assert (code, "127.0.0.1:1: " in told) == (1, True)
    code, _, told = serve(capsys, "--grpc", "127.0.0.1:1", *QUICK)
    assert (code, "127.0.0.1:1: no gateway answers there" in told) == (1, True)
    code, _, told = serve(capsys, "--grpc", island.address, "--mix", "B", "--rate", "1")
    assert (code, "the server takes" in told) == (2, True)
    (run,) = results(capsys, "--url", f"http://{island.http}", *QUICK, "--vocab-size", "90000")["runs"]
    assert (run["completed"], run["failed"]) == (0, 20)
    assert all("status 400" in error and "vocab" in error for error in run["errors"])


def test_without_a_server_one_is_started(small_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    @contextmanager
    def cluster(config: ClusterConfig) -> Iterator[Island]:
        with running_island(Path(str(config.model.path))) as running:
            yield running

    class IslandAsCluster:
        def __init__(self, config: ClusterConfig, processes: object = None) -> None:
            self._island = cluster(config)

        def start(self) -> str:
            return self._island.__enter__().address

        def stop(self) -> None:
            self._island.__exit__(None, None, None)

    monkeypatch.setattr(embedded, "Cluster", IslandAsCluster)
    monkeypatch.setattr(embedded, "fork_beside", lambda config: None)
    (run,) = results(capsys, "--rate", "20", "--requests", "10", "--warmup-seconds", "0")["runs"]
    assert (run["completed"], run["failed"]) == (10, 0)
