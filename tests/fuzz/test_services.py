"""A short run over all services of what `make fuzz` does for longer."""

from collections.abc import Iterator

import pytest

from tests.fuzz.services import GOOD_EVERY, OVERRIDES, Fuzz
from tests.support.checkpoints import save_checkpoint
from tests.support.island import Island, running_island

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def island(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Island]:
    with running_island(save_checkpoint("llama", tmp_path_factory.mktemp("fuzz") / "llama"), OVERRIDES) as island:
        yield island


def test_bad_calls_are_refused_and_good_ones_served(island: Island) -> None:
    outcome = Fuzz(island, seed=5).run(700)
    assert outcome.good >= 700 // GOOD_EVERY - 1
    assert sum(outcome.statuses.values()) >= 700
    for status in (
        "INVALID_ARGUMENT",
        "OK",
        "UNAUTHENTICATED",
        "UNIMPLEMENTED",
        "FAILED_PRECONDITION",
        "HTTP 200",
        "HTTP 400",
    ):
        assert any(status in seen for seen in outcome.statuses), f"no call had {status}: the fuzzer has gone blind"
