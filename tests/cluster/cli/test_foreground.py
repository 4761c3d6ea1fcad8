"""What `tandem up` shows on a terminal while it waits."""

import io
import sys

import pytest

from tandem.cluster.cli.foreground import _Loading


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_each_worker_has_a_line_with_its_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("COLUMNS", "120")
    with _Loading() as loading:
        loading.show([("local prefill (PE 0)", "weights", 1_000_000, 4_000_000), ("local decode (PE 1)", "", 0, 0)])
    with _Loading() as loading:
        loading.show([("local prefill (PE 0)", "kernels", 4_000_000, 4_000_000)])
    shown = terminal.getvalue()
    assert "local prefill (PE 0): weights" in shown
    assert "1.0/4.0 MB" in shown
    assert "local decode (PE 1) " in shown
    assert "local prefill (PE 0): kernels" in shown


def test_nothing_is_drawn_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    with _Loading() as loading:
        loading.show([("local prefill (PE 0)", "weights", 1, 4)])
    assert capsys.readouterr() == ("", "")
