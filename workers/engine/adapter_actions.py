"""The calls of an engine about LoRA adapters."""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager

from tandem.workers.adapters.adapters import Adapters
from tandem.workers.adapters.held_adapter import HeldAdapter
from tandem.workers.adapters.peft_folder import Found
from tandem.workers.engine.actions import action
from tandem.workers.errors import AdapterNotHeld, InvalidCall


class AdapterActions:
    """See Engine. Ranks and replays read the same folder: an action names it, and the digest of what was there."""

    _adapters: Adapters | None
    adapter_position = 0
    """Grows with each adapter that new requests may use, or may use no more."""

    @action
    def read_adapter(self, number: int, name: str, path: str) -> None:
        """See Adapters.read. Raises NoRoom, and InvalidCall where this worker has no slots."""
        if self._adapters is None:
            raise InvalidCall(f"path {path:.80}: adapters.max_resident is 0; it must be at least 1")
        self._adapters.read(number, name, path)

    @action
    def load_adapter(self, number: int, digest: bytes) -> None:
        """See Adapters.load."""
        if self._adapters is not None:
            self._adapters.load(number, digest)
            self.adapter_position += 1

    @action
    def drop_adapter(self, number: int) -> None:
        """See Adapters.drop."""
        if self._adapters is not None:
            self._adapters.drop(number)

    @action
    def remove_adapter(self, digest: bytes) -> None:
        """See Adapters.remove."""
        if self._adapters is not None:
            self._adapters.remove(digest)
            self.adapter_position += 1

    @property
    def adapters(self) -> tuple[HeldAdapter, ...]:
        """LoRA adapters that the worker holds, the oldest first."""
        return () if self._adapters is None else self._adapters.held

    def holds_adapter(self, digest: bytes) -> bool:
        """See Adapters.holds."""
        return self._adapters is not None and self._adapters.holds(digest)

    def has_slot(self, digest: bytes, spare: int = 0) -> bool:
        """Returns whether a sequence with this adapter, b"" for none, finds a slot now, and leaves `spare` unused. True
        if admit() refuses for another reason."""
        return not digest or self._adapters is None or self._adapters.fits(digest, spare)

    @property
    def num_adapter_slots(self) -> int:
        return 0 if self._adapters is None else self._adapters.num_slots

    @property
    def adapters_in_use(self) -> Mapping[bytes, int]:
        """See Adapters.in_use."""
        return {} if self._adapters is None else self._adapters.in_use

    def adapter_read(self, number: int) -> "Future[Found]":
        """A poll: see Adapters.reading."""
        assert self._adapters is not None, "read_adapter() comes first"
        return self._adapters.reading(number)

    @property
    def first_adapter_read(self) -> tuple[int, bytes] | None:
        """A poll: see Adapters.first_read."""
        return None if self._adapters is None else self._adapters.first_read

    def ranks_have_read(self, number: int, digest: bytes) -> bool | None:
        """Returns whether all other ranks of this worker have read the same as the leader; None while one reads. Any
        thread may call it, for the oldest reading that is neither loaded nor dropped."""
        return True

    def _warm_up_adapters(self) -> None:
        if self._adapters is not None:
            self._adapters.warm_up()

    def _take_adapter(self, sequence: int, digest: bytes) -> None:
        """Raises AdapterNotHeld and OutOfSlots."""
        if digest and self._adapters is None:
            raise AdapterNotHeld(digest)
        if digest and self._adapters is not None:
            self._adapters.take(sequence, digest)

    def _release_adapter(self, sequence: int) -> None:
        if self._adapters is not None:
            self._adapters.release(sequence)

    def _park_adapter(self, sequence: int) -> None:
        if self._adapters is not None:
            self._adapters.park(sequence)

    @contextmanager
    def _adapter_of_parked(self, sequence: int) -> Iterator[None]:
        """Gives a parked sequence its adapter for the block in which it comes back. Raises OutOfSlots."""
        if self._adapters is None:
            yield
            return
        self._adapters.resume(sequence)
        try:
            yield
        except BaseException:
            self._adapters.stay_parked(sequence)
            raise

    def _forget_adapter(self, sequence: int) -> None:
        if self._adapters is not None:
            self._adapters.forget(sequence)
