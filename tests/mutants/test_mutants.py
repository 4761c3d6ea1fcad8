"""The list of mutants fits the product and the tests, so that `make mutants` can judge them all."""

import ast
from pathlib import Path

import pytest

from tests.mutants.mutant import Mutant
from tests.mutants.mutants import MUTANTS

CHECKOUT = Path(__file__).resolve().parents[2]
LEAST_MUTANTS = 30


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_fits_one_place_and_names_tests_that_are_there(mutant: Mutant) -> None:
    original = (CHECKOUT / mutant.file).read_text(encoding="utf-8")
    changed = mutant.applied(original)
    assert changed != original
    if mutant.module is not None:
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(original))
        compile(changed, mutant.file, "exec")
    assert mutant.tests
    for test in mutant.tests:
        file, *names = test.partition("[")[0].split("::")
        text = (CHECKOUT / file).read_text(encoding="utf-8")
        for name in names:
            assert f"def {name}(" in text or f"class {name}:" in text, f"{file} has no {name}"


def test_names_differ_and_there_are_enough() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names) >= LEAST_MUTANTS


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_has_its_reason_in_one_sentence(mutant: Mutant) -> None:
    assert mutant.reason[0].isupper()
    assert mutant.reason.endswith(".")
    assert ". " not in mutant.reason
    assert len(mutant.reason.split()) <= 25
