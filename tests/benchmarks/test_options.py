"""Options that benchmarks share, and what of a benchmark they choose."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from tests.benchmarks import steps
from tests.benchmarks.contexts import Contexts
from tests.benchmarks.options import Budget, add_list, benchmark_parser
from tests.benchmarks.records import RESULTS, read_peer


def test_lists_take_spaces_and_commas() -> None:
    parser = benchmark_parser("/x/steps.py", "What it is.")
    add_list(parser, "--rows", int, default=(1,), choices=[1, 8, 64])
    assert parser.parse_args([]).rows == (1,)
    assert parser.parse_args(["--rows", "1,8", "64"]).rows == [1, 8, 64]
    assert parser.parse_args([]).benchmark == "steps"


@pytest.mark.parametrize("given", ["7", "x", ","])
def test_other_values_of_a_list_are_refused(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = benchmark_parser("steps.py", None)
    add_list(parser, "--rows", int, choices=[1, 8])
    with pytest.raises(SystemExit):
        parser.parse_args(["--rows", given])
    assert "--rows" in capsys.readouterr().err


def test_record_takes_a_folder_or_the_usual_one() -> None:
    parser = benchmark_parser("steps.py", None)
    assert parser.parse_args([]).record is None
    assert parser.parse_args(["--record"]).record == RESULTS
    assert parser.parse_args(["--record", "/out"]).record == Path("/out")


def test_a_spent_budget_lets_no_case_begin_but_the_least() -> None:
    assert list(Budget(None).within(range(5))) == [0, 1, 2, 3, 4]
    assert list(Budget(-1.0).within(itertools.count(), least=2)) == [0, 1]
    assert list(Budget(-1.0).within(range(5), least=0)) == []


def test_contexts_are_a_number_or_a_mix() -> None:
    assert Contexts.parse("1024").lengths(3).tolist() == [1024] * 3
    mixed = Contexts.parse("mix:one-long").lengths(10)
    assert mixed.max() == mixed[0] == 8192
    assert 423 <= mixed[1:].min() <= mixed[1:].max() <= 1123
    drawn = Contexts.parse("mix:lognormal")
    assert np.array_equal(drawn.lengths(64), drawn.lengths(64))
    assert 900 < drawn.lengths(10_000).mean() < 1300
    for wrong in ("0", "-1", "mix:none"):
        with pytest.raises(ValueError, match="mix:lognormal"):
            Contexts.parse(wrong)


def test_steps_run_all_or_what_is_chosen() -> None:
    usual = steps.decodes_of(None, None)
    assert [steps.title(one) for one in usual[-3:]] == ["decode 256 at 1024", "decode 1 at 8192", "decode 1 at 32768"]
    chosen = steps.decodes_of([8, 64], [Contexts("mix:one-long")])
    assert [steps.title(one) for one in chosen] == ["decode 8 at mix:one-long", "decode 64 at mix:one-long"]
    assert steps.positions_needed(usual) == 256 * 1200 + 40_960
    assert steps.positions_needed([(64, Contexts("8192"))]) > 64 * 8192


def test_targets_are_those_of_what_was_measured() -> None:
    numbers = {"to_floor": 1.1, "idle_us": 3.0}
    found = steps.targets_of({"qwen3-8b": {"decode 64 at 1024": numbers}, "qwen3-4b": {"decode 64 at 1024": numbers}})
    assert [one["name"] for one in found] == ["qwen3-8b, decode of 64 ÷ floor", "qwen3-8b, decode of 64, idle µs"]


def test_peers_of_steps_are_found() -> None:
    assert read_peer("steps", "qwen3-8b.decode 64 at 1024.ms") == 7.91
    assert read_peer("steps", "qwen3-8b.decode 63 at 1024.ms") is None
