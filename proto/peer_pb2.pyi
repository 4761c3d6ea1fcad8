from tandem.proto import admin_pb2 as _admin_pb2
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
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
    __slots__ = ("request_id", "resumes", "stamp")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RESUMES_FIELD_NUMBER: _ClassVar[int]
    STAMP_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    resumes: bool
    stamp: int
    def __init__(self, request_id: _Optional[str] = ..., resumes: bool = ..., stamp: _Optional[int] = ...) -> None: ...

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
