"""`tandem bench`, through the command line, over a checkout of its own with benchmarks that end in every way."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.bench.benchmarks import Outcome
from tests.benchmarks.bench.plots import draw_plots, shares_of_targets
from tests.benchmarks.results import at_least, at_most, percentile, plot, rounded

ROOT = Path(__file__).resolve().parents[2]
TANDEM = [sys.executable, "-m", "tandem.cluster.cli", "bench"]
RESULT = {
    "targets": [at_most("ratio of 8K", 1.23456, 1.5), at_least("ratio of 1K", 0.5, 0.85), at_most("idle", 0.0, 0.0)],
    "plots": [
        plot("GB a second", "tokens", "GB/s", [1024, 8192], {"ours": [1.0, 2.0], "theirs": [0.5, 1.5]}),
        plot("phases", "", "s", ["ray", "weights"], {"first": [3.0, 1.0]}),
    ],
}
FAKES = {
    "measured": f"print('WARN: a library wrote this'); print('''{json.dumps(RESULT, indent=2)}''')",
    "plain": 'print(\'{"roof": {"gb_s": 394.5}, "name": "x", "exact": true}\')',
    "absent": 'print(\'{"skipped": "needs two GPUs"}\')',
    "broken": "raise SystemExit(3)",
    "silent": "print('nothing of use')",
}
Done = subprocess.CompletedProcess[str]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout" / "tests" / "benchmarks"
    shutil.copytree(ROOT / "tests" / "benchmarks" / "bench", folder / "bench")
    (tmp_path / "checkout" / "pyproject.toml").write_text('[project]\nname = "tandem-serve"\n')
    for name, body in FAKES.items():
        (folder / f"{name}.py").write_text(f'"""What {name} is.\n\nMore."""\nif __name__ == "__main__":\n    {body}\n')
    (folder / "shared.py").write_text("X = 1\n")
    return tmp_path / "checkout"


def bench(folder: Path, *arguments: str) -> Done:
    return subprocess.run([*TANDEM, *arguments], cwd=folder, capture_output=True, text=True, timeout=90, check=False)


def test_results_targets_and_files(checkout: Path) -> None:
    done = bench(checkout / "tests", "measured", "plain", "absent", "--out", "out")
    assert done.returncode == 0, done.stderr
    table = {tuple(part.strip() for part in line.split("│")[1:-1]) for line in done.stdout.splitlines() if "│" in line}
    assert ("measured", "ratio of 8K", "1.235", "≤ 1.5", "yes") in table
    assert ("measured", "ratio of 1K", "0.5", "≥ 0.85", "no") in table
    assert ("measured", "idle", "0", "≤ 0", "yes") in table
    assert ("plain", "roof.gb_s", "394.5", "", "") in table
    assert ("absent", "skipped: needs two GPUs", "", "", "") in table
    assert sum(row[0] == "plain" for row in table) == 1
    written = checkout / "tests" / "out"
    assert json.loads((written / "measured.json").read_text()) == RESULT
    assert json.loads((written / "absent.json").read_text()) == {"skipped": "needs two GPUs"}
    assert "matplotlib" in done.stdout or (written / "targets.png").exists()


def test_a_benchmark_that_fails_is_named_and_the_others_run(checkout: Path) -> None:
    done = bench(checkout, "broken", "silent", "plain", "--out", "out")
    assert done.returncode == 1
    assert done.stderr == "tandem: failed: broken, silent\n"
    assert "failed: ended with exit code 3" in done.stdout
    assert "nothing of use" in done.stdout
    assert json.loads((checkout / "out" / "plain.json").read_text())["name"] == "x"


def test_list_has_what_can_be_run(checkout: Path) -> None:
    done = bench(checkout, "--list")
    assert done.returncode == 0
    assert [line.split(maxsplit=1) for line in done.stdout.splitlines()] == [
        [name, f"What {name} is."] for name in sorted(FAKES)
    ]


def test_the_benchmarks_of_this_checkout_are_listed() -> None:
    listed = {line.split()[0] for line in bench(ROOT, "--list").stdout.splitlines()}
    assert {"control", "push", "ttft", "push_beside_prefill", "start", "serving"} <= listed
    prints = {path.stem for path in (ROOT / "tests" / "benchmarks").glob("*.py") if "print_result(" in path.read_text()}
    assert listed == prints - {"results"}


def test_unknown_names_and_other_folders_are_refused(checkout: Path, tmp_path: Path) -> None:
    done = bench(checkout, "nosuch")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "nosuch" in done.stderr
    assert "measured" in done.stderr
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "other"\n')
    outside = bench(tmp_path)
    assert outside.returncode == 2
    assert outside.stderr.startswith(f"tandem: the current folder {tmp_path} is in no checkout of tandem")


@pytest.mark.long
def test_a_real_benchmark_of_this_checkout(tmp_path: Path) -> None:
    done = bench(ROOT, "control", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "control.json").read_text())["map"]["fresh_bytes"] > 0
    assert "map of 32K tokens on fresh pages" in done.stdout


def test_plots_are_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    written = draw_plots([Outcome("fake", 1.0, RESULT), Outcome("other", 1.0, {"skipped": "why"})], tmp_path)
    assert [path.name for path in written] == ["fake-gb-a-second.png", "fake-phases.png", "targets.png"]
    for path in written:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 5000


def test_without_matplotlib_there_are_results_and_advice(checkout: Path) -> None:
    hidden = checkout / "hidden"
    hidden.mkdir()
    (hidden / "matplotlib.py").write_text("raise ImportError('not here')\n")
    done = subprocess.run(
        [*TANDEM, "plain", "--out", "out"],
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": str(hidden)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "pip install 'tandem-serve[bench]'" in done.stdout
    assert (checkout / "out" / "plain.json").exists()
    shutil.rmtree(checkout / "out")


def test_shares_are_at_most_one_exactly_where_a_target_is_reached() -> None:
    shares = shares_of_targets([Outcome("b", 0.0, RESULT)])
    assert shares == {"b: ratio of 8K": 1.235 / 1.5, "b: ratio of 1K": 0.85 / 0.5, "b: idle": 0.0}


def test_numbers_of_results() -> None:
    assert (rounded(1234567.0), rounded(0.00012345), rounded(0)) == (1235000.0, 0.0001234, 0.0)
    assert (percentile([3.0], 99), percentile(list(range(101)), 99), percentile([1.0, 2.0], 50)) == (3.0, 99.0, 1.5)
