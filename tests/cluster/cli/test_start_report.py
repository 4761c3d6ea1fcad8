"""Tests what `tandem up` prints on stderr while it starts."""

import io
import re
import sys

import pytest

from tandem.cluster.cli import start_report
from tandem.cluster.cli.start_report import PHASES, StartReport
from tandem.cluster.supervision.start_clock import StartClock

PREFILL, DECODE = "local prefill (PE 0)", "local decode (PE 1)"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_each_phase_says_what_it_does_and_how_long_the_last_took(capsys: pytest.CaptureFixture[str]) -> None:
    with StartReport("mine") as report:
        clock = StartClock(report.phase)
        for phase in ("host", "ray"):
            with clock.phase(phase):
                pass
        report.phase("weights")
        report.phase("weights")  # of a second island
    host, ray, weights = capsys.readouterr().err.splitlines()
    assert host == f"tandem: mine: {PHASES['host']}"
    assert ray.startswith(f"tandem: mine: {PHASES['ray']} (host: ")
    assert weights.startswith(f"tandem: mine: {PHASES['weights']} (ray: ")
    assert list(clock.seconds) == ["host", "ray"]


def test_a_terminal_shows_a_bar_for_each_worker_and_the_lines_above(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("COLUMNS", "120")
    with StartReport("mine") as report:
        report.show([(PREFILL, "weights", 1_000_000, 4_000_000), (DECODE, "", 0, 0)])
        report.phase("gateway")
    with StartReport("mine") as report:
        report.show([(PREFILL, "kernels", 7, 0)])
    shown = terminal.getvalue()
    assert f"{PREFILL}: weights" in shown
    assert "1.0/4.0 MB" in shown
    assert f"{DECODE} " in shown
    assert f"{PREFILL}: kernels, 7 ready" in shown
    assert PHASES["gateway"] in shown


def test_a_long_phase_says_again_and_again_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    states = [(PREFILL, "weights", 1 << 30, 4 << 30), (DECODE, "", 0, 0)]
    with StartReport("mine") as report:
        report.phase("weights")
        report.show(states)
        monkeypatch.setattr(start_report, "LINE_SECONDS", 0.0)
        report.show(states)
        report.show([])  # no worker answers
        report.show([(PREFILL, "kernels", 12, 0)])
    *_, kernels = (before := capsys.readouterr().err).splitlines()
    assert kernels.endswith(f": {PREFILL} 12 ready")
    _, line, unanswered, _ = before.splitlines()
    assert re.fullmatch(r"tandem: mine: weights, \d+ s so far", unanswered)
    assert line.startswith("tandem: mine: weights, ")
    assert line.endswith(f" s so far: {PREFILL} weights, 1.0 of 4.0 GiB; {DECODE} waits")
