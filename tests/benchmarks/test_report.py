"""Records of runs, and the pages that are generated from them."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import records
from tests.benchmarks.measured import Measured
from tests.benchmarks.report.__main__ import pages, stale
from tests.benchmarks.report.decisions import index_of, read_decision
from tests.benchmarks.report.pages import printed
from tests.benchmarks.report.rows import number_rows, read_records, target_rows
from tests.benchmarks.results import at_most
from tests.benchmarks.results import print_result as show

PAGE_LINES = 65
DECISION = """# 0001: Push pages in batches

transfer · 2026-11-22 · `push.py`

**Question.** Which?

**Decision.** This. **Reopen when** it fails.
"""


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Makes the folders of results and of decisions."""
    kept, decisions = tmp_path / "results", tmp_path / "decisions"
    kept.mkdir()
    decisions.mkdir()
    peer = {"benchmark": "steps", "number": "8b.ms", "peer": "vLLM", "value": 5.0}
    (kept / "peers.json").write_text(json.dumps({"peers": [peer]}))
    covered = {"what": "steps", "hosts": ["h200"], "outcome": "passed", "commit": "a", "date": "2026-11-22"}
    row = {"what": "8B, ms", "number": "8b.ms", "limit": "8b.floor", "target": "step, ms"}
    section = {
        "title": "Steps",
        "unit": "ms",
        "record": f"steps-{records.host_kind(0)}",
        "text": "One step.",
        "rows": [row],
    }
    (kept / "headlines.json").write_text(json.dumps({"sections": [section]}))
    (kept / "coverage.json").write_text(json.dumps({"coverage": [covered]}))
    (decisions / "0001-push-pages.md").write_text(DECISION)
    return kept, decisions


def result(milliseconds: list[float], **more: Any) -> dict[str, Any]:
    median = Measured.median(milliseconds)
    targets = [at_most("step, ms", median, 4.0)]
    return {"8b": {"ms": median, "floor": 3.0, "to_vllm": None}, "exact": True, "targets": targets, "plots": [], **more}


def record(folder: Path, milliseconds: list[float], **more: Any) -> dict[str, Any]:
    """A run of a benchmark, and what is kept of all its runs."""
    path = records.add_run("steps", result(milliseconds, **more), gpus=0, commit="abc", folder=folder)
    return json.loads(path.read_text())


def test_a_run_is_added_to_those_before_with_spread_and_host(folders: tuple[Path, Path]) -> None:
    kept, _ = folders
    record(kept, [4.5])
    both = record(kept, [3.0, 3.5, 5.0])
    assert [run["numbers"]["8b.ms"]["median"] for run in both["runs"]] == [4.5, 3.5]
    newest = both["runs"][-1]
    assert newest["numbers"]["8b.ms"] == {"median": 3.5, "spread": [3.0, 5.0], "repeats": 3}
    assert newest["commit"] == "abc"
    assert newest["versions"]["python"]
    assert newest["host"]["cores"] > 0
    assert both["host_kind"] == f"cpu-{newest['host']['cores']}"
    assert [path.name for path in kept.glob("steps-*")] == [f"steps-{both['host_kind']}.json"]


def test_other_options_are_other_numbers(folders: tuple[Path, Path]) -> None:
    kept, _ = folders
    run = record(kept, [4.5], case="puts")["runs"][0]
    assert list(run["numbers"]) == ["puts: 8b.ms", "puts: 8b.floor"]
    assert run["targets"][0]["name"] == "puts: step, ms"


def test_rows_have_target_peer_spread_and_the_run_before(folders: tuple[Path, Path]) -> None:
    kept, _ = folders
    record(kept, [5.0])
    record(kept, [4.0, 4.4, 4.2])
    peers = {("steps", "8b.ms"): [("vLLM", 5.0)]}
    (one,) = read_records(kept)
    (_, number), (target,) = number_rows(one, peers), target_rows(one)
    assert (number.value, number.before, number.spread, number.run) == (4.2, 5.0, (4.0, 4.4), 1)
    assert list(number.peers) == [("vLLM", 5.0)]
    assert (str(target.target), target.missed, target.before) == ("≤ 4", True, 5.0)


def test_a_number_that_the_newest_run_left_out_comes_from_the_one_before(folders: tuple[Path, Path]) -> None:
    kept, _ = folders
    record(kept, [5.0])
    part = record(kept, [4.0])
    part["runs"][-1]["numbers"] = {"other 16.ms": {"median": 1.0, "spread": None, "repeats": None}}
    part["runs"][-1]["numbers"]["other 8.ms"] = {"median": 0.5, "spread": None, "repeats": None}
    rows = number_rows(part, {})
    assert [(row.name, row.value, row.run) for row in rows] == [
        ("8b.floor", 3.0, 2),
        ("8b.ms", 5.0, 2),
        ("other 8.ms", 0.5, 1),
        ("other 16.ms", 1.0, 1),
    ]


def test_pages_are_stale_once_a_run_is_added_or_a_decision_changes(folders: tuple[Path, Path]) -> None:
    kept, decisions = folders
    record(kept, [4.5])
    assert len(stale(kept, decisions)) == 2
    for path, text in pages(kept, decisions).items():
        path.write_text(text)
    assert stale(kept, decisions) == []
    page = (kept.parent / "RESULTS.md").read_text()
    assert "| 8B, ms | 4.5 (4.5 to 4.5) | 1.50 | ≤ 4: **not reached** | vLLM: 5 (0.90 ×) |" in page
    record(kept, [4.6])
    (decisions / "0002-more.md").write_text(DECISION.replace("0001", "0002"))
    assert [path.name for path in stale(kept, decisions)] == ["RESULTS.md", "README.md"]


def test_the_results_fit_on_one_page() -> None:
    lines = (records.RESULTS.parent / "RESULTS.md").read_text().splitlines()
    assert len(lines) <= PAGE_LINES


def test_a_headline_whose_number_was_renamed_is_refused(folders: tuple[Path, Path]) -> None:
    kept, decisions = folders
    record(kept, [4.5], case="puts")
    with pytest.raises(ValueError, match="step, ms"):
        pages(kept, decisions)


def test_a_target_holds_for_the_ratio_to_the_limit(folders: tuple[Path, Path]) -> None:
    kept, decisions = folders
    record(kept, [4.5])
    path = kept / "headlines.json"
    path.write_text(path.read_text().replace('"limit": "8b.floor"', '"to_limit": "8b.floor"'))
    assert "| 8B, ms | 4.5 (4.5 to 4.5) | 3.00 | ≤ 4: reached |" in pages(kept, decisions)[kept.parent / "RESULTS.md"]


def test_the_whole_of_a_record_the_missed_targets_and_the_coverage_are_printed(folders: tuple[Path, Path]) -> None:
    kept, _ = folders
    record(kept, [4.0, 4.4, 4.2])
    whole = printed(kept, "steps")
    assert "| 8b.ms | 4.2 | 4 to 4.4 |  | vLLM: 5 (0.84 ×) |" in whole
    assert "commit abc" in whole
    assert "| step, ms | 4.2 | ≤ 4 |" in printed(kept, "targets")
    assert "| steps | h200 | 2026-11-22 | a | passed |" in printed(kept, "coverage")
    with pytest.raises(ValueError, match="one of steps, targets, coverage"):
        printed(kept, "step")


def test_pages_of_this_checkout_are_up_to_date() -> None:
    """Run `python -m tests.benchmarks.report` where this fails."""
    root = Path(__file__).resolve().parents[2]
    assert stale(records.RESULTS, root / "docs" / "decisions") == []


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (DECISION.replace("# 0001", "# 1"), "NNNN"),
        (DECISION.replace("**Decision.** ", ""), "Decision"),
        (DECISION + "\n".join(["more"] * 30), "lines"),
    ],
)
def test_what_is_no_decision_is_named(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "0001-a.md"
    path.write_text(text)
    with pytest.raises(ValueError, match=named):
        read_decision(path)


def test_a_gap_in_the_numbers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "0002-a.md").write_text(DECISION.replace("0001", "0002"))
    with pytest.raises(ValueError, match="1, 2, 3"):
        index_of(tmp_path)


def test_a_benchmark_records_only_when_asked(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    kept, _ = folders
    options = Namespace(benchmark="steps", record=None, commit="abc")
    show(result([4.5]), options)
    assert read_records(kept) == []
    options.record = kept
    show(result([4.5]), options)
    assert len(read_records(kept)) == 1
    assert json.loads(capsys.readouterr().out.split("}\n{")[0] + "}")["8b"]["ms"] == 4.5


def test_json_of_records_reads_back() -> None:
    value = {"a": [1, 2.5, None, "ü"], "b": {"c": {"d": "x" * 200}, "e": []}, "f": {}}
    assert json.loads(records.to_json(value)) == value
