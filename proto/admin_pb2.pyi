from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AddAdapterRequest(_message.Message):
    __slots__ = ("name", "path", "load_inplace")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    LOAD_INPLACE_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    load_inplace: bool
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., load_inplace: bool = ...) -> None: ...

class UnserveAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[ServedAdapter]
    def __init__(self, adapters: _Optional[_Iterable[_Union[ServedAdapter, _Mapping]]] = ...) -> None: ...

class ServedAdapter(_message.Message):
    __slots__ = ("name", "path", "digest", "rank", "bytes", "workers", "holding", "resident")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    HOLDING_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    digest: bytes
    rank: int
    bytes: int
    workers: int
    holding: int
    resident: int
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., digest: _Optional[bytes] = ..., rank: _Optional[int] = ..., bytes: _Optional[int] = ..., workers: _Optional[int] = ..., holding: _Optional[int] = ..., resident: _Optional[int] = ...) -> None: ...

class GetTraceRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class GetTraceResponse(_message.Message):
    __slots__ = ("trace",)
    TRACE_FIELD_NUMBER: _ClassVar[int]
    trace: Trace
    def __init__(self, trace: _Optional[_Union[Trace, _Mapping]] = ...) -> None: ...

class Trace(_message.Message):
    __slots__ = ("request_id", "given_id", "trace_id", "sampled", "spans")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GIVEN_ID_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    given_id: str
    trace_id: str
    sampled: bool
    spans: _containers.RepeatedCompositeFieldContainer[Span]
    def __init__(self, request_id: _Optional[str] = ..., given_id: _Optional[str] = ..., trace_id: _Optional[str] = ..., sampled: bool = ..., spans: _Optional[_Iterable[_Union[Span, _Mapping]]] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("name", "process", "span_id", "parent_id", "begin_ns", "end_ns", "attributes")
    class AttributesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    SPAN_ID_FIELD_NUMBER: _ClassVar[int]
    PARENT_ID_FIELD_NUMBER: _ClassVar[int]
    BEGIN_NS_FIELD_NUMBER: _ClassVar[int]
    END_NS_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    process: str
    span_id: str
    parent_id: str
    begin_ns: int
    end_ns: int
    attributes: _containers.ScalarMap[str, str]
    def __init__(self, name: _Optional[str] = ..., process: _Optional[str] = ..., span_id: _Optional[str] = ..., parent_id: _Optional[str] = ..., begin_ns: _Optional[int] = ..., end_ns: _Optional[int] = ..., attributes: _Optional[_Mapping[str, str]] = ...) -> None: ...

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
