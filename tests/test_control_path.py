"""How a request's way through the processes is read from their logs; every method that is traced is there."""

from importlib import import_module
from pathlib import Path

import pytest

from tests.benchmarks.call_trace import TRACED, Event, read_events
from tests.benchmarks.control_path import Measured, of_one_request


@pytest.mark.parametrize(("module", "owner", "method"), [entry for entries in TRACED.values() for entry in entries])
def test_what_is_traced_is_there(module: str, owner: str, method: str) -> None:
    of = getattr(import_module(module), owner) if owner else import_module(module)
    assert callable(getattr(of, method))


def test_events_are_read_in_the_order_of_their_times(tmp_path: Path) -> None:
    log = tmp_path / "events"
    assert read_events(log) == []
    log.write_text("2.5\tdecode\tA.step begins\n2.0\tgateway\tB.call ends\n2.75\tdecode\tA.step begins\n")
    events = read_events(log)
    assert events[0] == Event(2.0, "gateway", "B.call ends")
    assert of_one_request([*events, Event(9.0, "decode", "A.step begins")], began=1.5) == {
        "gateway: B.call ends": 0.5, "decode: A.step begins": 1.0, "decode: A.step begins'": 1.25,
    }  # fmt: skip


def test_summary() -> None:
    measured = Measured(local=[1.0, 1.0, 1.0], first=[1.5, 1.25, 2.0], second=[2.0, 2.0, 4.0], step=[0.25, 0.5, 1.0])
    measured.path["b"] += [3.0, 1.0, 2.0]
    measured.path["a"] += [0.5]
    assert measured.summary() == {
        "local": 1000.0, "first_less_local": 500.0, "handoff_less_step": 750.0, "second_gap_to_step": 2.0,
        "path": {"a": 500.0, "b": 2000.0},
    }  # fmt: skip
