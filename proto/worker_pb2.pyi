from tandem.proto import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PositionMap(_message.Message):
    __slots__ = ("start_position", "num_tokens", "page_size", "runs", "layout_fingerprint", "sliding")
    START_POSITION_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SLIDING_FIELD_NUMBER: _ClassVar[int]
    start_position: int
    num_tokens: int
    page_size: int
    runs: _containers.RepeatedScalarFieldContainer[bytes]
    layout_fingerprint: int
    sliding: Sliding
    def __init__(self, start_position: _Optional[int] = ..., num_tokens: _Optional[int] = ..., page_size: _Optional[int] = ..., runs: _Optional[_Iterable[bytes]] = ..., layout_fingerprint: _Optional[int] = ..., sliding: _Optional[_Union[Sliding, _Mapping]] = ...) -> None: ...

class Sliding(_message.Message):
    __slots__ = ("window", "sink", "evict_after", "rotated")
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    SINK_FIELD_NUMBER: _ClassVar[int]
    EVICT_AFTER_FIELD_NUMBER: _ClassVar[int]
    ROTATED_FIELD_NUMBER: _ClassVar[int]
    window: int
    sink: int
    evict_after: bool
    rotated: int
    def __init__(self, window: _Optional[int] = ..., sink: _Optional[int] = ..., evict_after: bool = ..., rotated: _Optional[int] = ...) -> None: ...

class Reservation(_message.Message):
    __slots__ = ("reservation_id", "epoch", "target_pe", "signal_slot", "generation", "matched_tokens", "position_map", "pages", "writer_pe", "lease_seconds", "seal", "writer_epoch")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TARGET_PE_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_SLOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    POSITION_MAP_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    WRITER_PE_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    WRITER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    reservation_id: int
    epoch: int
    target_pe: int
    signal_slot: int
    generation: int
    matched_tokens: int
    position_map: PositionMap
    pages: int
    writer_pe: int
    lease_seconds: float
    seal: bytes
    writer_epoch: int
    def __init__(self, reservation_id: _Optional[int] = ..., epoch: _Optional[int] = ..., target_pe: _Optional[int] = ..., signal_slot: _Optional[int] = ..., generation: _Optional[int] = ..., matched_tokens: _Optional[int] = ..., position_map: _Optional[_Union[PositionMap, _Mapping]] = ..., pages: _Optional[int] = ..., writer_pe: _Optional[int] = ..., lease_seconds: _Optional[float] = ..., seal: _Optional[bytes] = ..., writer_epoch: _Optional[int] = ...) -> None: ...

class PromptSpec(_message.Message):
    __slots__ = ("token_ids", "salt", "encoder_tokens", "sliding", "whole", "num_output", "priority", "adapter")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    ENCODER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SLIDING_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    salt: bytes
    encoder_tokens: int
    sliding: _inference_pb2.SlidingWindow
    whole: bool
    num_output: int
    priority: int
    adapter: bytes
    def __init__(self, token_ids: _Optional[bytes] = ..., salt: _Optional[bytes] = ..., encoder_tokens: _Optional[int] = ..., sliding: _Optional[_Union[_inference_pb2.SlidingWindow, _Mapping]] = ..., whole: bool = ..., num_output: _Optional[int] = ..., priority: _Optional[int] = ..., adapter: _Optional[bytes] = ...) -> None: ...

class PrepareReceiveRequest(_message.Message):
    __slots__ = ("request_id", "epoch", "max_tokens", "writer_pe", "prompt", "writer_epoch", "fork_of", "parks")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WRITER_PE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    WRITER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    FORK_OF_FIELD_NUMBER: _ClassVar[int]
    PARKS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    max_tokens: int
    writer_pe: int
    prompt: PromptSpec
    writer_epoch: int
    fork_of: str
    parks: bool
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., max_tokens: _Optional[int] = ..., writer_pe: _Optional[int] = ..., prompt: _Optional[_Union[PromptSpec, _Mapping]] = ..., writer_epoch: _Optional[int] = ..., fork_of: _Optional[str] = ..., parks: bool = ...) -> None: ...

class AnnounceRequest(_message.Message):
    __slots__ = ("request_id", "epoch", "prompt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    prompt: PromptSpec
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., prompt: _Optional[_Union[PromptSpec, _Mapping]] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("request_id", "token_id", "logprobs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_id: int
    logprobs: _inference_pb2.TokenLogprobs
    def __init__(self, request_id: _Optional[str] = ..., token_id: _Optional[int] = ..., logprobs: _Optional[_Union[_inference_pb2.TokenLogprobs, _Mapping]] = ...) -> None: ...

class RemoteSendRequest(_message.Message):
    __slots__ = ("request_id", "epoch", "sampling", "reservation", "prompt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    sampling: _inference_pb2.SamplingParams
    reservation: Reservation
    prompt: PromptSpec
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., sampling: _Optional[_Union[_inference_pb2.SamplingParams, _Mapping]] = ..., reservation: _Optional[_Union[Reservation, _Mapping]] = ..., prompt: _Optional[_Union[PromptSpec, _Mapping]] = ...) -> None: ...

class RemoteSendResponse(_message.Message):
    __slots__ = ("first_token", "logprobs", "cached_tokens", "host_cached_tokens", "disk_cached_tokens", "queue_seconds", "prefill_seconds", "push_seconds", "bytes_pushed", "began_ns")
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DISK_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PUSH_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PUSHED_FIELD_NUMBER: _ClassVar[int]
    BEGAN_NS_FIELD_NUMBER: _ClassVar[int]
    first_token: int
    logprobs: _inference_pb2.TokenLogprobs
    cached_tokens: int
    host_cached_tokens: int
    disk_cached_tokens: int
    queue_seconds: float
    prefill_seconds: float
    push_seconds: float
    bytes_pushed: int
    began_ns: int
    def __init__(self, first_token: _Optional[int] = ..., logprobs: _Optional[_Union[_inference_pb2.TokenLogprobs, _Mapping]] = ..., cached_tokens: _Optional[int] = ..., host_cached_tokens: _Optional[int] = ..., disk_cached_tokens: _Optional[int] = ..., queue_seconds: _Optional[float] = ..., prefill_seconds: _Optional[float] = ..., push_seconds: _Optional[float] = ..., bytes_pushed: _Optional[int] = ..., began_ns: _Optional[int] = ...) -> None: ...

class ReadPromptsRequest(_message.Message):
    __slots__ = ("request_id", "epoch", "prompts", "mean", "skipped", "token_ids")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    MEAN_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    prompts: _containers.RepeatedCompositeFieldContainer[PromptSpec]
    mean: bool
    skipped: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., prompts: _Optional[_Iterable[_Union[PromptSpec, _Mapping]]] = ..., mean: bool = ..., skipped: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ReadPromptsResponse(_message.Message):
    __slots__ = ("values", "cached_tokens", "host_cached_tokens", "queue_seconds", "seconds", "disk_cached_tokens")
    VALUES_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    DISK_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    values: bytes
    cached_tokens: _containers.RepeatedScalarFieldContainer[int]
    host_cached_tokens: _containers.RepeatedScalarFieldContainer[int]
    queue_seconds: float
    seconds: float
    disk_cached_tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, values: _Optional[bytes] = ..., cached_tokens: _Optional[_Iterable[int]] = ..., host_cached_tokens: _Optional[_Iterable[int]] = ..., queue_seconds: _Optional[float] = ..., seconds: _Optional[float] = ..., disk_cached_tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class StartGenerateRequest(_message.Message):
    __slots__ = ("request_id", "epoch", "reservation_id", "sampling", "feed", "number", "num_output")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    FEED_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    reservation_id: int
    sampling: _inference_pb2.SamplingParams
    feed: int
    number: int
    num_output: int
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., reservation_id: _Optional[int] = ..., sampling: _Optional[_Union[_inference_pb2.SamplingParams, _Mapping]] = ..., feed: _Optional[int] = ..., number: _Optional[int] = ..., num_output: _Optional[int] = ...) -> None: ...

class GeneratedTokens(_message.Message):
    __slots__ = ("token_ids", "logprobs", "finish_reason", "fed", "prefilled", "decoded")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    FED_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_FIELD_NUMBER: _ClassVar[int]
    DECODED_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenLogprobs]
    finish_reason: _inference_pb2.FinishReason
    fed: int
    prefilled: Prefilled
    decoded: Decoded
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_inference_pb2.TokenLogprobs, _Mapping]]] = ..., finish_reason: _Optional[_Union[_inference_pb2.FinishReason, str]] = ..., fed: _Optional[int] = ..., prefilled: _Optional[_Union[Prefilled, _Mapping]] = ..., decoded: _Optional[_Union[Decoded, _Mapping]] = ...) -> None: ...

class Decoded(_message.Message):
    __slots__ = ("began_ns", "ended_ns", "drafted_tokens", "accepted_tokens")
    BEGAN_NS_FIELD_NUMBER: _ClassVar[int]
    ENDED_NS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    began_ns: int
    ended_ns: int
    drafted_tokens: int
    accepted_tokens: int
    def __init__(self, began_ns: _Optional[int] = ..., ended_ns: _Optional[int] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ...) -> None: ...

class Prefilled(_message.Message):
    __slots__ = ("cached_tokens", "host_cached_tokens", "disk_cached_tokens", "queue_seconds", "prefill_seconds", "began_ns")
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DISK_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BEGAN_NS_FIELD_NUMBER: _ClassVar[int]
    cached_tokens: int
    host_cached_tokens: int
    disk_cached_tokens: int
    queue_seconds: float
    prefill_seconds: float
    began_ns: int
    def __init__(self, cached_tokens: _Optional[int] = ..., host_cached_tokens: _Optional[int] = ..., disk_cached_tokens: _Optional[int] = ..., queue_seconds: _Optional[float] = ..., prefill_seconds: _Optional[float] = ..., began_ns: _Optional[int] = ...) -> None: ...

class PromptLogprobsRequest(_message.Message):
    __slots__ = ("request_id", "epoch")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class PackedLogprobs(_message.Message):
    __slots__ = ("logprobs", "top_ids", "top_logprobs")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprobs: bytes
    top_ids: bytes
    top_logprobs: bytes
    def __init__(self, logprobs: _Optional[bytes] = ..., top_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ...) -> None: ...

class FeedRequest(_message.Message):
    __slots__ = ("epoch", "feed")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FEED_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    feed: int
    def __init__(self, epoch: _Optional[int] = ..., feed: _Optional[int] = ...) -> None: ...

class FedTokens(_message.Message):
    __slots__ = ("numbers", "token_ids")
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    numbers: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, numbers: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_id", "epoch", "writer_quiet")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WRITER_QUIET_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    writer_quiet: bool
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., writer_quiet: bool = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("known",)
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    known: bool
    def __init__(self, known: bool = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("epoch", "name", "path", "digest")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    name: str
    path: str
    digest: bytes
    def __init__(self, epoch: _Optional[int] = ..., name: _Optional[str] = ..., path: _Optional[str] = ..., digest: _Optional[bytes] = ...) -> None: ...

class LoadedAdapter(_message.Message):
    __slots__ = ("digest", "rank", "bytes")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    rank: int
    bytes: int
    def __init__(self, digest: _Optional[bytes] = ..., rank: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class RemoveAdapterRequest(_message.Message):
    __slots__ = ("epoch", "digest")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    digest: bytes
    def __init__(self, epoch: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class RemoveAdapterResponse(_message.Message):
    __slots__ = ("known",)
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    known: bool
    def __init__(self, known: bool = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class WorkerReport(_message.Message):
    __slots__ = ("whole", "added", "removed", "prompt_tokens", "rows", "positions", "token_seconds", "prompt_tokens_per_second", "free_pages", "prompt_tokens_per_second_beside_rows", "stored_whole", "stored_added", "stored_removed", "stored_price", "adapters", "resident_adapters", "parked")
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_PER_SECOND_BESIDE_ROWS_FIELD_NUMBER: _ClassVar[int]
    STORED_WHOLE_FIELD_NUMBER: _ClassVar[int]
    STORED_ADDED_FIELD_NUMBER: _ClassVar[int]
    STORED_REMOVED_FIELD_NUMBER: _ClassVar[int]
    STORED_PRICE_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    PARKED_FIELD_NUMBER: _ClassVar[int]
    whole: bool
    added: bytes
    removed: bytes
    prompt_tokens: int
    rows: int
    positions: int
    token_seconds: float
    prompt_tokens_per_second: float
    free_pages: int
    prompt_tokens_per_second_beside_rows: float
    stored_whole: bool
    stored_added: bytes
    stored_removed: bytes
    stored_price: float
    adapters: bytes
    resident_adapters: bytes
    parked: int
    def __init__(self, whole: bool = ..., added: _Optional[bytes] = ..., removed: _Optional[bytes] = ..., prompt_tokens: _Optional[int] = ..., rows: _Optional[int] = ..., positions: _Optional[int] = ..., token_seconds: _Optional[float] = ..., prompt_tokens_per_second: _Optional[float] = ..., free_pages: _Optional[int] = ..., prompt_tokens_per_second_beside_rows: _Optional[float] = ..., stored_whole: bool = ..., stored_added: _Optional[bytes] = ..., stored_removed: _Optional[bytes] = ..., stored_price: _Optional[float] = ..., adapters: _Optional[bytes] = ..., resident_adapters: _Optional[bytes] = ..., parked: _Optional[int] = ...) -> None: ...
