import pytest

from tandem.workers.progress import ignore_progress, progress_bar


def test_a_bar_only_on_a_terminal_or_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("loading") as report:
        assert report is ignore_progress
    assert capsys.readouterr().err == ""
    with progress_bar("loading", show=True) as report:
        report(3_000_000, 6_000_000)
    assert "loading" in (shown := capsys.readouterr().err)
    assert "3.0/6.0 MB" in shown
