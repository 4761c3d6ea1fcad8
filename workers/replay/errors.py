"""What can be wrong with a record of a worker.

RecordError
├── NotAValue   an action's argument that cannot be written
├── BadRecord   a file, or a part of it, that no recorder of this version can have written
└── NoReplay    a record that cannot be replayed here: another model, another host, another device
"""


class RecordError(ValueError):
    """Names the value that was found, and what it must be."""


class NotAValue(RecordError):
    pass


class BadRecord(RecordError):
    pass


class NoReplay(RecordError):
    pass
