"""Checks what surrounds a capture; tests/gpu/test_prompts.py and test_steps.py capture."""

import gc

import pytest

from tandem.workers.runner.forward_graphs import uncollected


def fail() -> None:
    assert not gc.isenabled()
    raise RuntimeError("as the test says")


def test_the_collector_goes_on_as_before() -> None:
    with pytest.raises(RuntimeError, match="as the test says"), uncollected():
        fail()
    assert gc.isenabled()
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
