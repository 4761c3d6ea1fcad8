"""`tandem batch`: no row is lost or doubled, none goes before live traffic, and errors are named."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.cluster.cli import commands as cli
from tandem.cluster.cli.batch import command, run
from tandem.cluster.cli.batch.calls import Answer
from tandem.cluster.cli.batch.rows import Row
from tandem.cluster.cli.batch.run import Batch, Limits
from tests.cluster.open_gateway import OpenGateway, open_gateway
from tests.cluster.scripted_model import make_scripted
from tests.support.http_client import CHATS, COMPLETIONS, get
from tests.support.waiting import until

COUNT = 4  # output tokens of a row
TOKEN = "a-token-of-enough-characters-to-be-taken"
Outcome = tuple[int, str, str]


def say(sequence: list[int]) -> int:
    return (sum(sequence) * 7 + len(sequence)) % 90


def wanted(prompt: list[int]) -> list[int]:
    sequence = list(prompt)
    for _ in range(COUNT):
        sequence.append(say(sequence))
    return sequence[len(prompt) :]


def row(number: int, **body: Any) -> dict[str, Any]:
    prompt = [number % 89 + 1, number // 89 + 1, 3]
    asked = {"prompt": prompt, "max_tokens": COUNT, "return_token_ids": True, "ignore_eos": True, **body}
    return {"custom_id": f"row {number}", "method": "POST", "url": COMPLETIONS, "body": asked}


def write(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in rows))
    return path


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Returns the results by their ids, each of which occurs once."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = {one["custom_id"]: one for one in lines}
    assert len(found) == len(lines) == len({one["id"] for one in lines})
    return found


def assert_whole(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    found = read(path)
    assert {*found} == {one["custom_id"] for one in rows}
    for one in rows:
        response = found[one["custom_id"]]["response"]
        assert response["status_code"] == 200
        assert response["body"]["choices"][0]["token_ids"] == wanted(one["body"]["prompt"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_scripted(tmp_path_factory.mktemp("scripted") / "model")


@pytest.fixture(scope="module")
def gateway(model: Path) -> Iterator[OpenGateway]:
    with open_gateway(model, say=say) as gateway:
        yield gateway


@pytest.fixture
def batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Runs the command on in.jsonl and out.jsonl. Returns its exit code, stdout and stderr."""

    def call(address: str, *options: str) -> Outcome:
        files = str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")
        with pytest.raises(SystemExit) as ended:
            cli.main(["batch", *files, "--url", f"http://{address}", *options])
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return call


def test_each_way_to_generate(gateway: OpenGateway, batch: Callable[..., Outcome], tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": COUNT}
    others = [
        {"custom_id": "chat", "method": "POST", "url": CHATS, "body": chat},
        {"custom_id": "response", "method": "POST", "url": "/v1/responses", "body": {"input": "hello"}},
        {"custom_id": "too long", "method": "POST", "url": COMPLETIONS, "body": {"prompt": [1], "max_tokens": 1 << 20}},
    ]
    write(tmp_path / "in.jsonl", [row(0), *others, row(1)])
    code, out, _ = batch(gateway.http)
    assert (code, out) == (1, f"5 rows in {tmp_path / 'out.jsonl'}, 1 with an error\n")
    found = read(tmp_path / "out.jsonl")
    assert [*found["chat"]] == ["id", "custom_id", "response", "error"]
    assert found["chat"]["response"]["body"]["object"] == "chat.completion"
    assert found["chat"]["response"]["request_id"] in found["chat"]["response"]["body"]["id"]
    assert found["response"]["response"]["body"]["object"] == "response"
    assert found["too long"]["response"]["status_code"] == 400
    assert "max_tokens" in found["too long"]["response"]["body"]["error"]["message"]
    for number in (0, 1):
        body = found[f"row {number}"]["response"]["body"]
        assert body["choices"][0]["token_ids"] == wanted(row(number)["body"]["prompt"])


def test_what_has_a_result_is_not_sent_again(
    gateway: OpenGateway, batch: Callable[..., Outcome], tmp_path: Path
) -> None:
    rows = [row(number) for number in range(12)]
    write(tmp_path / "in.jsonl", rows[:5])
    assert batch(gateway.http)[0] == 0
    whole = (tmp_path / "out.jsonl").read_bytes()
    cut = whole[:-40]  # a kill in the middle of the last line
    (tmp_path / "out.jsonl").write_bytes(cut)
    write(tmp_path / "in.jsonl", rows)
    gateway.worker.prompts.clear()
    assert batch(gateway.http)[0] == 0
    assert (tmp_path / "out.jsonl").read_bytes().startswith(cut[: cut.rindex(b"\n") + 1])
    assert_whole(tmp_path / "out.jsonl", rows)
    assert len(gateway.worker.prompts) == 8
    assert batch(gateway.http)[0] == 0
    assert len(gateway.worker.prompts) == 8


def test_rows_go_behind_live_traffic(gateway: OpenGateway, batch: Callable[..., Outcome], tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", [row(0), row(1, priority=2), row(2, service_tier="priority")])
    gateway.worker.priorities.clear()
    assert batch(gateway.http, "--in-flight", "1")[0] == 0
    assert gateway.worker.priorities == [10, 2, 0]
    write(tmp_path / "in.jsonl", [row(number) for number in range(4)])
    gateway.worker.priorities.clear()
    assert batch(gateway.http, "--priority", "7")[0] == 0
    assert gateway.worker.priorities == [7]


def test_a_limit_is_waited_for_as_long_as_the_gateway_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier try would be refused again."""
    answers, waits = [Answer(429, b"{}", "", 60.0), Answer(200, b"{}", "r", None)], list[float]()
    monkeypatch.setattr(run.random, "uniform", lambda low, high: low)
    unused: Any = None
    running = Batch(unused, Limits(1, 1.0, 1.0), iter(()), unused)
    running._stop = SimpleNamespace(is_set=lambda: False, wait=waits.append)  # type: ignore[assignment]
    connection: Any = SimpleNamespace(call=lambda *_: answers.pop(0))
    line = running._line(connection, Row(1, "a", COMPLETIONS, {}))
    assert line is not None
    assert (line["response"]["status_code"], waits) == (200, [60.0])


def test_rows_for_embeddings_go_behind_live_traffic(
    gateway: OpenGateway, batch: Callable[..., Outcome], tmp_path: Path, model: Path
) -> None:
    gateway.worker.width = json.loads((model / "config.json").read_text())["hidden_size"]
    fields: list[dict[str, Any]] = [{}, {"priority": 2}, {"service_tier": "priority"}]
    bodies = [{"input": [5, 6, 7], **one} for one in fields]
    rows = [{"custom_id": str(number), "method": "POST", "url": "/v1/embeddings", "body": body}
            for number, body in enumerate(bodies)]  # fmt: skip
    write(tmp_path / "in.jsonl", rows)
    gateway.worker.priorities.clear()
    assert batch(gateway.http, "--in-flight", "1")[0] == 0
    assert gateway.worker.priorities == [10, 2, 0]


def test_only_so_many_are_in_flight(model: Path, batch: Callable[..., Outcome], tmp_path: Path) -> None:
    rows = [row(number) for number in range(20)]
    write(tmp_path / "in.jsonl", rows)
    with open_gateway(model, say=say, alone=True) as gateway, ThreadPoolExecutor(1) as pool:
        running = pool.submit(batch, gateway.http, "--in-flight", "3")
        until(lambda: get(gateway.http, "/load").json() == {"server_load": 3})
        gateway.island_comes()
        assert running.result(60)[0] == 0
    assert_whole(tmp_path / "out.jsonl", rows)


@pytest.mark.long
def test_a_full_gateway_is_asked_again(model: Path, batch: Callable[..., Outcome], tmp_path: Path) -> None:
    rows = [row(number) for number in range(12)]
    write(tmp_path / "in.jsonl", rows)
    with open_gateway(model, {"gateway.max_calls": 1}, say=say) as gateway:
        assert batch(gateway.http, "--in-flight", "4")[0] == 0
    assert_whole(tmp_path / "out.jsonl", rows)


@contextmanager
def answering(of: Callable[[dict[str, Any]], int]) -> Iterator[str]:
    """Runs a server, and yields its HOST:PORT. of: the status for a body; with 0 it hangs up."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(200 if self.path == "/ready" else 404)

        def do_POST(self) -> None:
            self.answer(of(json.loads(self.rfile.read(int(self.headers["content-length"])))))

        def answer(self, status: int) -> None:
            if not status:
                return
            self.send_response(status)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.gate("hangs-up")
@pytest.mark.parametrize("status", [503, 0], ids=["says-so", "hangs-up"])
def test_a_gateway_that_goes_away_ends_the_batch_and_loses_nothing(
    model: Path, batch: Callable[..., Outcome], tmp_path: Path, status: int
) -> None:
    rows = [row(number) for number in range(6)]
    write(tmp_path / "in.jsonl", rows)
    with answering(lambda body: status) as address:
        code, _, error = batch(address, "--patience", "0.2", "--in-flight", "2")
    assert code == 1
    assert "the gateway has been away for 0.2 s" in error
    assert read(tmp_path / "out.jsonl") == {}
    with open_gateway(model, say=say) as gateway:
        assert batch(gateway.http)[0] == 0
    assert_whole(tmp_path / "out.jsonl", rows)


def test_a_row_that_alone_fails_ends(
    batch: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row ends like this when its workers are lost each time. The last row ends, too, when no other row is left."""
    monkeypatch.setattr(run, "TRIES", 3)
    monkeypatch.setattr(run, "LONGEST_PAUSE", 0.2)
    rows = [row(number) for number in range(8)]
    write(tmp_path / "in.jsonl", rows)
    bad = rows[7]["body"]["prompt"]
    with answering(lambda body: 503 if body["prompt"] == bad else 200) as address:
        assert batch(address, "--in-flight", "1")[0] == 1
    found = read(tmp_path / "out.jsonl")
    assert len(found) == 8
    assert [key for key, one in found.items() if one["response"]["status_code"] != 200] == ["row 7"]


def test_one_row_that_cannot_go_on_ends_the_others(
    model: Path, batch: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others end at once, though they wait for answers."""
    write(tmp_path / "in.jsonl", [row(number) for number in range(3)])
    waits = threading.Event()

    def status(body: dict[str, Any]) -> int:
        if body["prompt"] == GOOD["body"]["prompt"]:
            return 401
        waits.wait(60)
        return 200

    with answering(status) as address:
        code, _, said = batch(address, "--in-flight", "3")
        assert not waits.is_set()
        waits.set()
    assert code == 1
    assert "another token" in said


GOOD = row(0)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("no", "line 2 is no JSON"),
        ("[" * 100000, "line 2 is no JSON"),
        ([], "line 2 is no JSON object"),
        ({**row(1), "custom_id": ""}, "line 2: custom_id is ''"),
        ({**row(1), "custom_id": 7}, "line 2: custom_id is 7"),
        (row(0), "line 2: custom_id is 'row 0', as in an earlier line"),
        ({**row(1), "method": "GET"}, "line 2: method is 'GET'; it must be POST"),
        (
            {**row(1), "url": "/v1/files"},
            "line 2: url is '/v1/files'; it must be one of /v1/chat/completions, /v1/completions",
        ),
        ({**row(1), "url": []}, "line 2: url is []"),
        ({**row(1), "body": "x"}, "line 2: body is 'x'"),
        (row(1, stream=True), "line 2: body.stream is True"),
    ],
)
def test_a_wrong_line_is_named_and_nothing_is_sent(
    gateway: OpenGateway, batch: Callable[..., Outcome], tmp_path: Path, line: Any, error: str
) -> None:
    write(tmp_path / "in.jsonl", [GOOD, line])
    gateway.worker.prompts.clear()
    code, _, said = batch(gateway.http)
    assert code == 2
    assert f"in.jsonl: {error}" in said
    assert not gateway.worker.prompts
    assert not (tmp_path / "out.jsonl").exists()


def test_embeddings_are_taken_where_the_gateway_has_them(
    gateway: OpenGateway, batch: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "IF_THERE", frozenset({"/tokenize", "/not/there"}))
    asked = {"custom_id": "a", "method": "POST", "url": "/tokenize", "body": {"prompt": "hello"}}
    write(tmp_path / "in.jsonl", [asked])
    assert batch(gateway.http)[0] == 0
    write(tmp_path / "in.jsonl", [{**asked, "custom_id": "b", "url": "/not/there"}])
    assert "url is '/not/there'" in batch(gateway.http)[2]


def test_a_file_of_something_else_is_kept(gateway: OpenGateway, batch: Callable[..., Outcome], tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", [GOOD])
    out = tmp_path / "out.jsonl"
    result = {"id": "x", "custom_id": "another", "response": {"status_code": 200}, "error": None}
    mine = {**result, "custom_id": "row 0"}
    for lines, error in (
        (["my notes"], "line 1 is no result"),
        ([result], "line 1 is about 'another'"),
        ([mine, mine], "line 2 is about 'row 0', as an earlier line is"),
    ):
        before = write(out, lines).read_bytes()
        code, _, said = batch(gateway.http)
        assert (code, out.read_bytes()) == (2, before)
        assert error in said
    same = str(tmp_path / "in.jsonl")
    with pytest.raises(SystemExit) as ended:
        cli.main(["batch", same, same])
    assert ended.value.code == 2


def test_two_batches_do_not_write_one_file(gateway: OpenGateway, batch: Callable[..., Outcome], tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", [GOOD])
    with (tmp_path / "out.jsonl").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        code, _, said = batch(gateway.http)
    assert code == 1
    assert "another `tandem batch` writes it" in said


def test_the_token(model: Path, batch: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "in.jsonl", [GOOD])
    with open_gateway(model, {"security.api_key": TOKEN}, say=say) as gateway:
        code, _, said = batch(gateway.http)
        assert code == 1
        assert "asks for another token" in said
        monkeypatch.setenv("TANDEM_API_KEY", TOKEN)
        assert batch(gateway.http)[0] == 0
        code, _, said = batch("tandem.example:8000")
        assert code == 2
        assert "use https" in said


def test_the_http_server_is_found_through_grpc(gateway: OpenGateway, tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", [GOOD])
    files = str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")
    with pytest.raises(SystemExit) as ended:
        cli.main(["batch", *files, "--address", gateway.grpc])
    assert not ended.value.code
    assert_whole(tmp_path / "out.jsonl", [GOOD])


@pytest.mark.long
def test_two_thousand_rows_and_ten_kills(model: Path, tmp_path: Path) -> None:
    rows = [row(number) for number in range(2000)]
    out = tmp_path / "out.jsonl"
    files = str(write(tmp_path / "in.jsonl", rows)), str(out)
    with open_gateway(model, say=say) as gateway:
        line = [sys.executable, "-m", "tandem.cluster.cli", "batch", *files, "--url", f"http://{gateway.http}"]
        for _ in range(10):
            before = out.stat().st_size if out.exists() else 0
            with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
                until(lambda: out.exists() and out.stat().st_size > before + 20000)  # noqa: B023
                os.kill(process.pid, signal.SIGKILL)
                assert process.wait() == -signal.SIGKILL
        assert 0 < len(out.read_bytes().splitlines()) < len(rows)
        ended = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (0, f"2000 rows in {out}, 0 with an error\n")
    assert_whole(out, rows)


@pytest.mark.long
def test_an_interrupt_ends_it_at_once_and_says_what_is_left(model: Path, tmp_path: Path) -> None:
    rows = [row(number) for number in range(8)]
    files = str(write(tmp_path / "in.jsonl", rows)), str(tmp_path / "out.jsonl")
    with open_gateway(model, say=say, alone=True) as gateway:
        line = [sys.executable, "-m", "tandem.cluster.cli", "batch", *files, "--url", f"http://{gateway.http}"]
        with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            until(lambda: get(gateway.http, "/load").json() == {"server_load": len(rows)})
            process.send_signal(signal.SIGINT)
            _, error = process.communicate(timeout=20)
        assert process.returncode == 1
        assert error.splitlines()[-1] == "tandem: stopped; 8 rows are left: run it again"
        until(lambda: get(gateway.http, "/load").json() == {"server_load": 0})  # its requests have ended, too
