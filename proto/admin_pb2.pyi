from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class GetMetricsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetMetricsResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("island", "num_prefill", "num_decode", "num_islands")
    ISLAND_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODE_FIELD_NUMBER: _ClassVar[int]
    NUM_ISLANDS_FIELD_NUMBER: _ClassVar[int]
    island: str
    num_prefill: int
    num_decode: int
    num_islands: int
    def __init__(self, island: _Optional[str] = ..., num_prefill: _Optional[int] = ..., num_decode: _Optional[int] = ..., num_islands: _Optional[int] = ...) -> None: ...

class ScaleResponse(_message.Message):
    __slots__ = ("island", "epoch", "num_prefill", "num_decode", "kept", "started", "ended", "seconds_away", "num_islands")
    ISLAND_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODE_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_AWAY_FIELD_NUMBER: _ClassVar[int]
    NUM_ISLANDS_FIELD_NUMBER: _ClassVar[int]
    island: str
    epoch: int
    num_prefill: int
    num_decode: int
    kept: int
    started: int
    ended: int
    seconds_away: float
    num_islands: int
    def __init__(self, island: _Optional[str] = ..., epoch: _Optional[int] = ..., num_prefill: _Optional[int] = ..., num_decode: _Optional[int] = ..., kept: _Optional[int] = ..., started: _Optional[int] = ..., ended: _Optional[int] = ..., seconds_away: _Optional[float] = ..., num_islands: _Optional[int] = ...) -> None: ...
