"""Lines of logs: what a client chose stays one bounded field, and no log holds its process up."""

import json
import logging
import re
import threading
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import pytest

from tandem.workers.logs import MAX_CHARACTERS, MAX_FIELD, MAX_LINES, LogSettings, close_log, formatter, open_log
from tandem.workers.logs import with_fields as fields

log = logging.getLogger("tandem.cluster.tracing.access_log")
HOSTILE = 'a\nb "c" \x1b[31m' + "d" * 500


@pytest.fixture
def json_lines(tmp_path: Path) -> Any:
    handler = open_log(LogSettings(format="json", folder=str(tmp_path / "logs")), "local/gateway.0")
    yield lambda: (close_log(handler), (tmp_path / "logs" / "local-gateway.0.log").read_text().splitlines())[1]
    close_log(handler)


def test_json_lines_parse(json_lines: Any) -> None:
    log.info("request", extra=fields(request_id=HOSTILE, prompt_tokens=3))
    try:
        raise ValueError("x" * 3 * MAX_CHARACTERS)
    except ValueError:
        log.exception("%s", "y" * 3 * MAX_CHARACTERS)
    first, second = map(json.loads, json_lines())
    assert (first["request_id"], first["prompt_tokens"]) == (HOSTILE[:MAX_FIELD], 3)
    assert (first["level"], first["process"], first["message"]) == ("info", "local/gateway.0", "request")
    assert len(second["message"]) == len(second["traceback"]) == MAX_CHARACTERS


def test_a_text_line_is_one_line() -> None:
    extra = fields(client=HOSTILE, status="stop")
    record = log.makeRecord(log.name, logging.INFO, "", 0, "request", (), None, extra=extra)
    line = formatter(LogSettings(), "").format(record)
    assert line.endswith(" status=stop")
    assert "\n" not in line
    assert "\x1b" not in line


def test_lines_beyond_the_bound_are_dropped(json_lines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = threading.Event()
    handle = RotatingFileHandler.emit

    def slow(self: RotatingFileHandler, record: logging.LogRecord) -> None:
        disk.wait(30)
        handle(self, record)

    monkeypatch.setattr(RotatingFileHandler, "emit", slow)
    for _ in range(2 * MAX_LINES):
        log.info("request")
    disk.set()
    assert 0 < len(json_lines()) <= MAX_LINES + 1


def test_defaults_write_the_same_lines_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    before = [*logging.getLogger("tandem").handlers]
    handler = open_log(LogSettings(), "local/worker.0")
    log.warning("the disk is slow", extra=fields(request_id="a"))
    close_log(handler)
    (line,) = capfd.readouterr().err.splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} the disk is slow request_id=a", line)
    assert logging.getLogger("tandem").handlers == before
