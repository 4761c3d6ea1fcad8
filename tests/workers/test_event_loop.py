import asyncio
import gc
import logging

import pytest

from tandem.workers.event_loop import unwatched


@pytest.mark.parametrize("watched", [False, True])
def test_an_exception_that_comes_too_late_is_not_logged(watched: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Nor would the test notice if asyncio logged none: the future that is left alone is logged."""

    async def give_up() -> None:
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        caller = asyncio.ensure_future(asyncio.wait_for(asyncio.shield(answer if watched else unwatched(answer)), 0.01))
        with pytest.raises(TimeoutError):
            await caller
        answer.set_exception(RuntimeError("too late"))
        await asyncio.sleep(0)

    with caplog.at_level(logging.ERROR, "asyncio"):
        asyncio.run(give_up())
        gc.collect()
    assert ("too late" in caplog.text) == watched
