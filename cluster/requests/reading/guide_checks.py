"""Checks in the gateway which grammars workers can follow."""

from collections import OrderedDict
from dataclasses import replace

from tandem.cluster.errors import InvalidRequest, ProcessEnded
from tandem.cluster.requests.reading.readers import READ_SECONDS, Readers, ReadTooSlow
from tandem.workers.sampling.guided import Guided, InvalidGuide

MOST_KNOWN = 64  # grammars whose outcome is kept; a text has up to 64 KiB
TRIES = 2  # a process may end for another reason, such as a lack of memory on its host


class GuideChecks:
    """Compiles grammars in the readers' processes, as workers will. Owned by the event loop.

    A compiler can take long, and some grammars end its process. So workers get only grammars that have been compiled
    here.
    """

    def __init__(self, readers: Readers, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """vocab_size, eos_token_ids: see Grammars."""
        self._readers = readers
        self._vocabulary = vocab_size, eos_token_ids
        self._known: OrderedDict[Guided, str] = OrderedDict()  # why a grammar is refused; empty if it is not

    async def check(self, host: str, guided: Guided) -> None:
        """Raises InvalidRequest for a grammar that no worker could follow. host: see Readers.run()."""
        guided = replace(guided, thinking=None)  # which has no part in it
        why = self._known.get(guided)
        if why is None:
            why = self._known[guided] = await self._compile(host, guided)
            if len(self._known) > MOST_KNOWN:
                self._known.popitem(last=False)
        if guided in self._known:
            self._known.move_to_end(guided)
        if why:
            raise InvalidRequest(f"sampling.guided: {why}")

    async def _compile(self, host: str, guided: Guided) -> str:
        for _ in range(TRIES):
            try:
                await self._readers.check_guide(host, guided, *self._vocabulary)
            except InvalidGuide as error:
                return str(error)
            except ReadTooSlow:
                raise InvalidRequest(
                    f"sampling.guided: {guided.kind} takes more than {READ_SECONDS:g} s to compile; send a simpler one"
                ) from None
            except ProcessEnded:
                continue
            return ""
        return f"{guided.kind} cannot be compiled: it is nested too deeply, or too large; send a simpler one"
