"""Whoever waits for an answer when Ray is lost hears of it."""

from concurrent.futures import Future

import pytest

from tandem.cluster.errors import ProcessEnded, RayLost
from tandem.cluster.processes.loss import Loss


def test_awaited_and_later_answers_fail() -> None:
    loss, early, done, late = Loss(), Future[int](), Future[int](), Future[int]()
    loss.awaited(early, "decode")
    loss.awaited(done, "decode")
    done.set_result(1)
    loss.check()
    loss.declare("its GCS has ended")
    loss.declare("and its raylet")
    loss.awaited(late, "gateway")
    assert done.result(0) == 1
    with pytest.raises(ProcessEnded, match=r"^decode ended: its GCS has ended$"):
        early.result(0)
    with pytest.raises(ProcessEnded, match=r"^gateway ended: its GCS has ended$"):
        late.result(0)
    with pytest.raises(RayLost, match="its GCS has ended"):
        loss.check()


def test_results_end_with_the_loss_and_with_time() -> None:
    loss, never, there = Loss(), Future[int](), Future[int]()
    there.set_result(1)
    assert loss.results([there, there], "a host", 1.0) == [1, 1]
    with pytest.raises(TimeoutError):
        loss.results([there, never], "a host", 0.01)
    loss.declare("its raylet has ended")
    with pytest.raises(ProcessEnded, match="raylet"):
        loss.results([never], "a host", 60.0)
