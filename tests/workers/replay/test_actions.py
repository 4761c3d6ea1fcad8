"""Each call of an engine is an action, which is recorded, or changes nothing."""

from inspect import isfunction

from tandem.workers.engine.actions import calls_of
from tandem.workers.engine.engine import ACTIONS, Engine
from tandem.workers.engine.watched_engine import PARAMETERS, WatchedEngine

QUESTIONS = {"takes", "room", "sequence", "digest", "prefix_changes", "can_park", "held", "has_slot", "holds_adapter"}
POLLS = {"mark", "peers_mark", "fence", "mailbox", "recalls_answered", "recalls_asked", "loss", "wait_for_ranks"}
POLLS |= {"has_arrived", "below", "is_lifted", "tend", "adapter_read", "ranks_have_read"}
OF_PEERS = {"part", "welcome"}  # who they are is no part of a record


def test_each_call_is_an_action_a_question_or_a_poll() -> None:
    calls = {name for name, value in calls_of(Engine).items() if isfunction(value) and not name.startswith("_")}
    assert calls == {*ACTIONS} | QUESTIONS | POLLS | OF_PEERS
    assert not {*ACTIONS} & (QUESTIONS | POLLS | OF_PEERS)


def test_a_recorded_engine_writes_actions_down_and_nothing_else() -> None:
    assert {name for name in vars(WatchedEngine) if not name.startswith("_")} == {*ACTIONS}
    assert {*PARAMETERS} == {*ACTIONS}
