from tandem.proto import admin_pb2 as _admin_pb2
from tandem.proto import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ClaimOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CLAIM_OUTCOME_UNSPECIFIED: _ClassVar[ClaimOutcome]
    CLAIM_OUTCOME_FREE: _ClassVar[ClaimOutcome]
    CLAIM_OUTCOME_IN_USE: _ClassVar[ClaimOutcome]
    CLAIM_OUTCOME_SUPERSEDED: _ClassVar[ClaimOutcome]
CLAIM_OUTCOME_UNSPECIFIED: ClaimOutcome
CLAIM_OUTCOME_FREE: ClaimOutcome
CLAIM_OUTCOME_IN_USE: ClaimOutcome
CLAIM_OUTCOME_SUPERSEDED: ClaimOutcome

class ClaimRequest(_message.Message):
    __slots__ = ("request_id", "resumes", "stamp", "whole_host", "origin")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RESUMES_FIELD_NUMBER: _ClassVar[int]
    STAMP_FIELD_NUMBER: _ClassVar[int]
    WHOLE_HOST_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    resumes: bool
    stamp: int
    whole_host: bool
    origin: int
    def __init__(self, request_id: _Optional[str] = ..., resumes: bool = ..., stamp: _Optional[int] = ..., whole_host: bool = ..., origin: _Optional[int] = ...) -> None: ...

class ClaimResponse(_message.Message):
    __slots__ = ("outcome",)
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    outcome: ClaimOutcome
    def __init__(self, outcome: _Optional[_Union[ClaimOutcome, str]] = ...) -> None: ...

class GiveWayRequest(_message.Message):
    __slots__ = ("client",)
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    client: int
    def __init__(self, client: _Optional[int] = ...) -> None: ...

class GiveWayResponse(_message.Message):
    __slots__ = ("gave_way",)
    GAVE_WAY_FIELD_NUMBER: _ClassVar[int]
    gave_way: bool
    def __init__(self, gave_way: bool = ...) -> None: ...

class GetGatewaysRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetGatewaysResponse(_message.Message):
    __slots__ = ("gateways",)
    GATEWAYS_FIELD_NUMBER: _ClassVar[int]
    gateways: _containers.RepeatedCompositeFieldContainer[_inference_pb2.GatewayProcessInfo]
    def __init__(self, gateways: _Optional[_Iterable[_Union[_inference_pb2.GatewayProcessInfo, _Mapping]]] = ...) -> None: ...

class GetPlacedRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetPlacedResponse(_message.Message):
    __slots__ = ("cells", "tokens")
    CELLS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    cells: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, cells: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class GetKeyCountsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetKeyCountsResponse(_message.Message):
    __slots__ = ("ids", "cells", "counts", "table")
    IDS_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    cells: bytes
    counts: bytes
    table: int
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., cells: _Optional[bytes] = ..., counts: _Optional[bytes] = ..., table: _Optional[int] = ...) -> None: ...
