"""Tests what is told, and what may be started, while Ray's GCS is away. Its servers are sockets."""

import math
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tandem.cluster.errors import RayAway, RayLost
from tandem.cluster.processes import ray_watch
from tandem.cluster.processes.loss import Loss
from tandem.cluster.processes.ray_watch import RayWatch
from tests.support.waiting import until

SAME, OTHER = "this cluster", "another one"


class Watched:
    """A watch, its servers, and what it has said."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, patience_seconds: float) -> None:
        self.servers = {name: socket.create_server(("127.0.0.1", 0)) for name in ("GCS", "raylet")}
        self.address = self.servers["GCS"].getsockname()
        self.found: list[Any] = []  # at the GCS that is back, the last one first
        self.loss = Loss()
        self.lost: list[str] = []
        self.told: list[str] = []
        monkeypatch.setattr(ray_watch, "answered_cluster", lambda *_: self.found.pop())
        self.watch = RayWatch(
            self.address,
            self.servers["raylet"].getsockname(),
            SAME,
            self.loss,
            self.lost.append,
            self.told.append,
            patience_seconds,
        )
        self.held = {name: server.accept()[0] for name, server in self.servers.items()}

    def end(self, name: str) -> None:
        self.servers[name].close()
        self.held[name].close()

    def start_gcs(self, *found: Any) -> None:
        self.found = list(reversed(found))
        self.servers["GCS"] = socket.create_server(self.address)

    def close(self) -> None:
        self.watch.close()
        for one in (*self.servers.values(), *self.held.values()):
            one.close()


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    watched = Watched(monkeypatch, math.inf)
    yield watched
    watched.close()


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    watched = Watched(monkeypatch, 0.0)
    yield watched
    watched.close()


def test_nothing_is_started_until_the_gcs_is_back_and_what_was_left_for_later_is_done_then(joined: Watched) -> None:
    done: list[str] = []
    joined.loss.check()
    joined.end("GCS")
    until(lambda: len(joined.told) == 1)
    assert "has lost its GCS: what runs serves on, and nothing is started until it is back" in joined.told[0]
    with pytest.raises(RayAway, match="nothing is started until it is back"):
        joined.loss.check()
    joined.loss.when_there(lambda: done.append("later"))
    assert not done
    joined.start_gcs(None, SAME)  # it does not answer at once
    until(lambda: joined.told[1:] == [""])
    joined.loss.check()
    assert done == ["later"]
    joined.loss.when_there(lambda: done.append("now"))
    assert done == ["later", "now"]
    assert not joined.lost


def test_a_gcs_that_comes_back_empty_is_a_loss(joined: Watched) -> None:
    joined.end("GCS")
    until(lambda: joined.told)
    joined.start_gcs(OTHER)
    until(lambda: joined.lost)
    assert joined.lost[0].endswith("is lost: its GCS has started anew, without what it knew")
    with pytest.raises(RayAway):
        joined.loss.check()


def test_the_raylet_is_a_loss_also_while_the_gcs_is_away(joined: Watched) -> None:
    joined.end("GCS")
    until(lambda: joined.told)
    joined.end("raylet")
    until(lambda: joined.lost)
    assert joined.lost[0].endswith("is lost: its raylet has ended")


def test_a_raylet_that_an_empty_gcs_has_ended_is_not_the_reason(joined: Watched) -> None:
    """However soon the GCS itself is asked, one of both watches tells of the loss, and once."""
    joined.end("GCS")
    until(lambda: joined.told)
    joined.start_gcs(OTHER, OTHER)
    joined.end("raylet")
    until(lambda: joined.lost)
    joined.watch.close()
    assert [reason.partition(": ")[2] for reason in joined.lost] == ["its GCS has started anew, without what it knew"]


def test_the_gcs_of_an_own_ray_does_not_come_back(own: Watched) -> None:
    """A start that needs the GCS ends the cluster."""
    own.end("GCS")
    until(lambda: own.told)
    assert own.told[0].endswith("nothing is started until tandem up is started again")
    with pytest.raises(RayLost, match="has lost its GCS"):
        own.loss.check()
    assert not own.lost


def test_patience_with_a_gcs_of_this_host_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, 0.2)
    watched.end("GCS")
    until(lambda: watched.told)
    assert watched.told[0].endswith("until it is back")
    until(lambda: _raised(watched.loss) is RayLost)
    watched.start_gcs(SAME)
    until(lambda: _raised(watched.loss) is None)
    watched.close()


def _raised(loss: Loss) -> type[Exception] | None:
    try:
        loss.check()
    except RayLost as error:
        return type(error)
    except RayAway:
        return RayAway
    return None
