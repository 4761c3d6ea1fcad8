"""The names that requests may give as their model: the served model's, and those of its adapters."""

from collections.abc import Callable, Sequence

from tandem.cluster.adapters.values import Adapter, AdapterSet
from tandem.cluster.errors import AdapterRefused, Unavailable, UnknownModel

MOST_SHOWN = 8  # names in an error
Allows = Callable[[str], bool]
"""Whether a caller may use a name."""


def anything(name: str) -> bool:
    """Allows all names."""
    return True


class ServedNames:
    """The served names as one gateway process knows them. Owned by its event loop; other threads may look names up."""

    def __init__(self, model: Sequence[str], adapters: AdapterSet | None = None, *, settled: bool = True) -> None:
        """model: names of the served model; answers carry the first. settled: no update() is on its way."""
        self.model = tuple(model)
        self._adapters = adapters or AdapterSet()
        self._settled = settled

    @property
    def adapters(self) -> AdapterSet:
        return self._adapters

    def update(self, adapters: AdapterSet) -> bool:
        """Takes a set unless it is older than the last one. Returns whether it was taken."""
        self._settled = True
        if adapters.version <= self._adapters.version:
            return False
        self._adapters = adapters
        return True

    @property
    def all(self) -> tuple[str, ...]:
        return (*self.model, *self._adapters.by_name)

    def seen(self, allows: Allows) -> tuple[str, ...]:
        """Returns all names that a caller may use."""
        return tuple(filter(allows, self.all))

    def adapter(self, asked: str | None, allows: Allows = anything) -> Adapter | None:
        """Returns the adapter that a request's model names, or None for the served model. UnknownModel for any other
        name, and for a name that the caller may not use; Unavailable while that name may still arrive."""
        if not any(map(allows, [asked] if asked else self.model)):
            raise UnknownModel(
                f"model is {f'{asked!r:.80}' if asked else 'missing'}; {shown(self.seen(allows))} served here"
            )
        if not asked or asked in self.model:
            return None
        adapter = self._adapters.by_name.get(asked)
        if adapter is None and not self._settled:
            raise Unavailable(f"model is {asked!r:.80}; this gateway process has just started, and may know it soon")
        if adapter is None:
            raise UnknownModel(f"model is {asked!r:.80}; {shown(self.seen(allows))} served here")
        return adapter

    def answer(self, asked: str | None, allows: Allows = anything) -> str:
        """Returns the name in answers to a request. UnknownModel as adapter() raises it."""
        adapter = self.adapter(asked, allows)
        return self.model[0] if adapter is None else adapter.name

    def check(self, digest: bytes) -> None:
        """Raises AdapterRefused unless some name still stands for these weights. Empty: the model's own weights."""
        if digest and not self._adapters.has_digest(digest):
            raise AdapterRefused(
                f"the adapter of the request (digest {digest.hex()}) was removed, or its name was loaded with other "
                "weights; send the request again without resume"
            )


def shown(names: Sequence[str]) -> str:
    """Lists the names in words, with their verb. Of many names it lists the first ones."""
    if not names:
        return "none is"
    more = len(names) - MOST_SHOWN
    if more > 0:
        return f"{', '.join(map(repr, names[:MOST_SHOWN]))} and {more} more are"
    *first, last = map(repr, names)
    return f"{', '.join(first)} and {last} are" if first else f"{last} is"
