from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason
FINISH_REASON_ERROR: FinishReason
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "fields")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    fields: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., fields: _Optional[str] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages", "template_kwargs", "add_generation_prompt", "continue_final_message", "tools")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_KWARGS_FIELD_NUMBER: _ClassVar[int]
    ADD_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_FINAL_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    template_kwargs: str
    add_generation_prompt: bool
    continue_final_message: bool
    tools: str
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., template_kwargs: _Optional[str] = ..., add_generation_prompt: bool = ..., continue_final_message: bool = ..., tools: _Optional[str] = ...) -> None: ...

class Prompt(_message.Message):
    __slots__ = ("text", "token_ids", "token_bytes")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: TokenIds
    token_bytes: bytes
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., token_bytes: _Optional[bytes] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "text", "token_ids", "chat", "token_bytes", "fork", "sampling", "resume", "cache_salt", "add_special_tokens", "truncate_prompt_tokens", "return_prompt_token_ids", "encoder_prompt", "decoder_prompt", "service_tier", "model")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RETURN_PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ENCODER_PROMPT_FIELD_NUMBER: _ClassVar[int]
    DECODER_PROMPT_FIELD_NUMBER: _ClassVar[int]
    SERVICE_TIER_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    text: str
    token_ids: TokenIds
    chat: Chat
    token_bytes: bytes
    fork: Fork
    sampling: SamplingParams
    resume: Resume
    cache_salt: str
    add_special_tokens: bool
    truncate_prompt_tokens: int
    return_prompt_token_ids: bool
    encoder_prompt: Prompt
    decoder_prompt: Prompt
    service_tier: str
    model: str
    def __init__(self, request_id: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., token_bytes: _Optional[bytes] = ..., fork: _Optional[_Union[Fork, _Mapping]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., cache_salt: _Optional[str] = ..., add_special_tokens: bool = ..., truncate_prompt_tokens: _Optional[int] = ..., return_prompt_token_ids: bool = ..., encoder_prompt: _Optional[_Union[Prompt, _Mapping]] = ..., decoder_prompt: _Optional[_Union[Prompt, _Mapping]] = ..., service_tier: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class Fork(_message.Message):
    __slots__ = ("request_id", "index", "position", "token_ids")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    index: int
    position: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., index: _Optional[int] = ..., position: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("token_ids", "answers", "adapter")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    answers: _containers.RepeatedCompositeFieldContainer[AnswerSoFar]
    adapter: bytes
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., answers: _Optional[_Iterable[_Union[AnswerSoFar, _Mapping]]] = ..., adapter: _Optional[bytes] = ...) -> None: ...

class AnswerSoFar(_message.Message):
    __slots__ = ("token_ids", "ended")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    ended: bool
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., ended: bool = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "logprobs", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words", "bad_words_ids", "allowed_token_ids", "guided", "prompt_logprobs", "n", "best_of", "sliding", "first_token_seconds", "priority")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_IDS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    GUIDED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    BEST_OF_FIELD_NUMBER: _ClassVar[int]
    SLIDING_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    logprobs: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    skip_special_tokens: bool
    include_stop_str_in_output: bool
    min_tokens: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    bad_words_ids: _containers.RepeatedCompositeFieldContainer[TokenIds]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    guided: Guided
    prompt_logprobs: int
    n: int
    best_of: int
    sliding: SlidingWindow
    first_token_seconds: float
    priority: int
    def __init__(self, max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., logprobs: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., skip_special_tokens: bool = ..., include_stop_str_in_output: bool = ..., min_tokens: _Optional[int] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., bad_words: _Optional[_Iterable[str]] = ..., bad_words_ids: _Optional[_Iterable[_Union[TokenIds, _Mapping]]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., guided: _Optional[_Union[Guided, _Mapping]] = ..., prompt_logprobs: _Optional[int] = ..., n: _Optional[int] = ..., best_of: _Optional[int] = ..., sliding: _Optional[_Union[SlidingWindow, _Mapping]] = ..., first_token_seconds: _Optional[float] = ..., priority: _Optional[int] = ...) -> None: ...

class SlidingWindow(_message.Message):
    __slots__ = ("window", "sinks")
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    SINKS_FIELD_NUMBER: _ClassVar[int]
    window: int
    sinks: int
    def __init__(self, window: _Optional[int] = ..., sinks: _Optional[int] = ...) -> None: ...

class Guided(_message.Message):
    __slots__ = ("json_schema", "regex", "grammar", "choice", "thinking")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    THINKING_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    regex: str
    grammar: str
    choice: Choice
    thinking: Thinking
    def __init__(self, json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., grammar: _Optional[str] = ..., choice: _Optional[_Union[Choice, _Mapping]] = ..., thinking: _Optional[_Union[Thinking, _Mapping]] = ...) -> None: ...

class Thinking(_message.Message):
    __slots__ = ("begin", "end", "opened", "max_tokens")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    begin: str
    end: str
    opened: bool
    max_tokens: int
    def __init__(self, begin: _Optional[str] = ..., end: _Optional[str] = ..., opened: bool = ..., max_tokens: _Optional[int] = ...) -> None: ...

class Choice(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("chosen", "top")
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    chosen: TokenLogprob
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, chosen: _Optional[_Union[TokenLogprob, _Mapping]] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "output_tokens", "drafted_tokens", "accepted_tokens", "host_cached_tokens", "disk_cached_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DISK_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    host_cached_tokens: int
    disk_cached_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., host_cached_tokens: _Optional[int] = ..., disk_cached_tokens: _Optional[int] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("queue_seconds", "prefill_seconds", "push_seconds", "first_token_seconds", "bytes_pushed", "total_seconds", "pages", "attempts", "expected_first_token_seconds", "moves")
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PUSH_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PUSHED_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIRST_TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    queue_seconds: float
    prefill_seconds: float
    push_seconds: float
    first_token_seconds: float
    bytes_pushed: int
    total_seconds: float
    pages: int
    attempts: int
    expected_first_token_seconds: float
    moves: int
    def __init__(self, queue_seconds: _Optional[float] = ..., prefill_seconds: _Optional[float] = ..., push_seconds: _Optional[float] = ..., first_token_seconds: _Optional[float] = ..., bytes_pushed: _Optional[int] = ..., total_seconds: _Optional[float] = ..., pages: _Optional[int] = ..., attempts: _Optional[int] = ..., expected_first_token_seconds: _Optional[float] = ..., moves: _Optional[int] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("request_id", "token_ids", "text", "finish_reason", "logprobs", "usage", "timings", "prompt_logprobs", "index", "stop_string", "stop_token_id", "prompt_token_bytes", "adapter")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    finish_reason: FinishReason
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    usage: Usage
    timings: Timings
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    index: int
    stop_string: str
    stop_token_id: int
    prompt_token_bytes: bytes
    adapter: bytes
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., index: _Optional[int] = ..., stop_string: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., prompt_token_bytes: _Optional[bytes] = ..., adapter: _Optional[bytes] = ...) -> None: ...

class EmbedRequest(_message.Message):
    __slots__ = ("request_id", "inputs", "dimensions", "normalize", "prompt_name", "prompt", "truncate_prompt_tokens", "add_special_tokens", "cache_salt", "priority", "service_tier")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_NAME_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SERVICE_TIER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    inputs: _containers.RepeatedCompositeFieldContainer[Prompt]
    dimensions: int
    normalize: bool
    prompt_name: str
    prompt: str
    truncate_prompt_tokens: int
    add_special_tokens: bool
    cache_salt: str
    priority: int
    service_tier: str
    def __init__(self, request_id: _Optional[str] = ..., inputs: _Optional[_Iterable[_Union[Prompt, _Mapping]]] = ..., dimensions: _Optional[int] = ..., normalize: bool = ..., prompt_name: _Optional[str] = ..., prompt: _Optional[str] = ..., truncate_prompt_tokens: _Optional[int] = ..., add_special_tokens: bool = ..., cache_salt: _Optional[str] = ..., priority: _Optional[int] = ..., service_tier: _Optional[str] = ...) -> None: ...

class EmbedResponse(_message.Message):
    __slots__ = ("request_id", "values", "dimensions", "usage", "timings")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    values: bytes
    dimensions: int
    usage: Usage
    timings: Timings
    def __init__(self, request_id: _Optional[str] = ..., values: _Optional[bytes] = ..., dimensions: _Optional[int] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("name", "architecture", "dtype", "vocab_size", "max_model_len", "num_layers", "page_size", "kv_bytes_per_token", "eos_token_ids", "has_tokenizer", "has_chat_template", "max_encoder_tokens", "quantization")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    HAS_TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    MAX_ENCODER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    name: str
    architecture: str
    dtype: str
    vocab_size: int
    max_model_len: int
    num_layers: int
    page_size: int
    kv_bytes_per_token: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    has_tokenizer: bool
    has_chat_template: bool
    max_encoder_tokens: int
    quantization: str
    def __init__(self, name: _Optional[str] = ..., architecture: _Optional[str] = ..., dtype: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., num_layers: _Optional[int] = ..., page_size: _Optional[int] = ..., kv_bytes_per_token: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., has_tokenizer: bool = ..., has_chat_template: bool = ..., max_encoder_tokens: _Optional[int] = ..., quantization: _Optional[str] = ...) -> None: ...

class GetClusterInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("role", "pe", "pid", "address", "alive", "num_pages", "free_pages", "cached_pages", "draining_pages", "running", "waiting", "resident_bytes", "counters", "token_seconds", "prompt_tokens_per_second", "ranks", "state_pages", "free_state_pages", "snapshots", "snapshot_bytes", "host_bytes", "host_bytes_used", "disk_bytes", "disk_bytes_used", "parked", "parked_bytes", "parked_bytes_used", "adapters", "gpu_bytes_of_others")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    CACHED_PAGES_FIELD_NUMBER: _ClassVar[int]
    DRAINING_PAGES_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    STATE_PAGES_FIELD_NUMBER: _ClassVar[int]
    FREE_STATE_PAGES_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_USED_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_USED_FIELD_NUMBER: _ClassVar[int]
    PARKED_FIELD_NUMBER: _ClassVar[int]
    PARKED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PARKED_BYTES_USED_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    GPU_BYTES_OF_OTHERS_FIELD_NUMBER: _ClassVar[int]
    role: Role
    pe: int
    pid: int
    address: str
    alive: bool
    num_pages: int
    free_pages: int
    cached_pages: int
    draining_pages: int
    running: int
    waiting: int
    resident_bytes: int
    counters: WorkerCounters
    token_seconds: float
    prompt_tokens_per_second: float
    ranks: _containers.RepeatedCompositeFieldContainer[RankInfo]
    state_pages: int
    free_state_pages: int
    snapshots: int
    snapshot_bytes: int
    host_bytes: int
    host_bytes_used: int
    disk_bytes: int
    disk_bytes_used: int
    parked: int
    parked_bytes: int
    parked_bytes_used: int
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterInfo]
    gpu_bytes_of_others: int
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., pe: _Optional[int] = ..., pid: _Optional[int] = ..., address: _Optional[str] = ..., alive: bool = ..., num_pages: _Optional[int] = ..., free_pages: _Optional[int] = ..., cached_pages: _Optional[int] = ..., draining_pages: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., counters: _Optional[_Union[WorkerCounters, _Mapping]] = ..., token_seconds: _Optional[float] = ..., prompt_tokens_per_second: _Optional[float] = ..., ranks: _Optional[_Iterable[_Union[RankInfo, _Mapping]]] = ..., state_pages: _Optional[int] = ..., free_state_pages: _Optional[int] = ..., snapshots: _Optional[int] = ..., snapshot_bytes: _Optional[int] = ..., host_bytes: _Optional[int] = ..., host_bytes_used: _Optional[int] = ..., disk_bytes: _Optional[int] = ..., disk_bytes_used: _Optional[int] = ..., parked: _Optional[int] = ..., parked_bytes: _Optional[int] = ..., parked_bytes_used: _Optional[int] = ..., adapters: _Optional[_Iterable[_Union[AdapterInfo, _Mapping]]] = ..., gpu_bytes_of_others: _Optional[int] = ...) -> None: ...

class AdapterInfo(_message.Message):
    __slots__ = ("digest", "name", "rank", "bytes", "resident", "sequences", "removed")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    name: str
    rank: int
    bytes: int
    resident: bool
    sequences: int
    removed: bool
    def __init__(self, digest: _Optional[bytes] = ..., name: _Optional[str] = ..., rank: _Optional[int] = ..., bytes: _Optional[int] = ..., resident: bool = ..., sequences: _Optional[int] = ..., removed: bool = ...) -> None: ...

class RankInfo(_message.Message):
    __slots__ = ("rank", "pid", "alive", "stalled", "resident_bytes")
    RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    STALLED_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    rank: int
    pid: int
    alive: bool
    stalled: bool
    resident_bytes: int
    def __init__(self, rank: _Optional[int] = ..., pid: _Optional[int] = ..., alive: bool = ..., stalled: bool = ..., resident_bytes: _Optional[int] = ...) -> None: ...

class WorkerCounters(_message.Message):
    __slots__ = ("stale_calls", "stale_signals", "expired_leases", "recalled", "corrupt", "reservations", "drains", "pushes", "bytes_pushed", "prompt_tokens", "decoded_tokens", "drafted_tokens", "accepted_tokens", "evicted_snapshots", "host_pages_down", "host_pages_up", "host_hits", "host_bad_pages", "host_skipped_hits", "disk_pages_down", "disk_pages_up", "disk_bad_pages", "disk_lost_pages", "disk_errors", "disk_adopted_pages", "disk_skipped_hits", "parks", "resumes")
    STALE_CALLS_FIELD_NUMBER: _ClassVar[int]
    STALE_SIGNALS_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_LEASES_FIELD_NUMBER: _ClassVar[int]
    RECALLED_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_FIELD_NUMBER: _ClassVar[int]
    RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    DRAINS_FIELD_NUMBER: _ClassVar[int]
    PUSHES_FIELD_NUMBER: _ClassVar[int]
    BYTES_PUSHED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    HOST_PAGES_DOWN_FIELD_NUMBER: _ClassVar[int]
    HOST_PAGES_UP_FIELD_NUMBER: _ClassVar[int]
    HOST_HITS_FIELD_NUMBER: _ClassVar[int]
    HOST_BAD_PAGES_FIELD_NUMBER: _ClassVar[int]
    HOST_SKIPPED_HITS_FIELD_NUMBER: _ClassVar[int]
    DISK_PAGES_DOWN_FIELD_NUMBER: _ClassVar[int]
    DISK_PAGES_UP_FIELD_NUMBER: _ClassVar[int]
    DISK_BAD_PAGES_FIELD_NUMBER: _ClassVar[int]
    DISK_LOST_PAGES_FIELD_NUMBER: _ClassVar[int]
    DISK_ERRORS_FIELD_NUMBER: _ClassVar[int]
    DISK_ADOPTED_PAGES_FIELD_NUMBER: _ClassVar[int]
    DISK_SKIPPED_HITS_FIELD_NUMBER: _ClassVar[int]
    PARKS_FIELD_NUMBER: _ClassVar[int]
    RESUMES_FIELD_NUMBER: _ClassVar[int]
    stale_calls: int
    stale_signals: int
    expired_leases: int
    recalled: int
    corrupt: int
    reservations: int
    drains: int
    pushes: int
    bytes_pushed: int
    prompt_tokens: int
    decoded_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    evicted_snapshots: int
    host_pages_down: int
    host_pages_up: int
    host_hits: int
    host_bad_pages: int
    host_skipped_hits: int
    disk_pages_down: int
    disk_pages_up: int
    disk_bad_pages: int
    disk_lost_pages: int
    disk_errors: int
    disk_adopted_pages: int
    disk_skipped_hits: int
    parks: int
    resumes: int
    def __init__(self, stale_calls: _Optional[int] = ..., stale_signals: _Optional[int] = ..., expired_leases: _Optional[int] = ..., recalled: _Optional[int] = ..., corrupt: _Optional[int] = ..., reservations: _Optional[int] = ..., drains: _Optional[int] = ..., pushes: _Optional[int] = ..., bytes_pushed: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., decoded_tokens: _Optional[int] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., evicted_snapshots: _Optional[int] = ..., host_pages_down: _Optional[int] = ..., host_pages_up: _Optional[int] = ..., host_hits: _Optional[int] = ..., host_bad_pages: _Optional[int] = ..., host_skipped_hits: _Optional[int] = ..., disk_pages_down: _Optional[int] = ..., disk_pages_up: _Optional[int] = ..., disk_bad_pages: _Optional[int] = ..., disk_lost_pages: _Optional[int] = ..., disk_errors: _Optional[int] = ..., disk_adopted_pages: _Optional[int] = ..., disk_skipped_hits: _Optional[int] = ..., parks: _Optional[int] = ..., resumes: _Optional[int] = ...) -> None: ...

class IslandInfo(_message.Message):
    __slots__ = ("name", "epoch", "transport", "workers", "restarts", "host")
    NAME_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    name: str
    epoch: int
    transport: str
    workers: _containers.RepeatedCompositeFieldContainer[WorkerInfo]
    restarts: int
    host: str
    def __init__(self, name: _Optional[str] = ..., epoch: _Optional[int] = ..., transport: _Optional[str] = ..., workers: _Optional[_Iterable[_Union[WorkerInfo, _Mapping]]] = ..., restarts: _Optional[int] = ..., host: _Optional[str] = ...) -> None: ...

class ClusterInfo(_message.Message):
    __slots__ = ("name", "version", "queued", "active", "uptime_seconds", "islands", "gateway_restarts", "http_address", "gateways", "scaling", "starts_nothing")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ISLANDS_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_RESTARTS_FIELD_NUMBER: _ClassVar[int]
    HTTP_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    GATEWAYS_FIELD_NUMBER: _ClassVar[int]
    SCALING_FIELD_NUMBER: _ClassVar[int]
    STARTS_NOTHING_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    queued: int
    active: int
    uptime_seconds: float
    islands: _containers.RepeatedCompositeFieldContainer[IslandInfo]
    gateway_restarts: int
    http_address: str
    gateways: _containers.RepeatedCompositeFieldContainer[GatewayProcessInfo]
    scaling: ScalingInfo
    starts_nothing: str
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., queued: _Optional[int] = ..., active: _Optional[int] = ..., uptime_seconds: _Optional[float] = ..., islands: _Optional[_Iterable[_Union[IslandInfo, _Mapping]]] = ..., gateway_restarts: _Optional[int] = ..., http_address: _Optional[str] = ..., gateways: _Optional[_Iterable[_Union[GatewayProcessInfo, _Mapping]]] = ..., scaling: _Optional[_Union[ScalingInfo, _Mapping]] = ..., starts_nothing: _Optional[str] = ...) -> None: ...

class ScalingInfo(_message.Message):
    __slots__ = ("min_islands", "max_islands", "wanted_islands", "waits_for")
    MIN_ISLANDS_FIELD_NUMBER: _ClassVar[int]
    MAX_ISLANDS_FIELD_NUMBER: _ClassVar[int]
    WANTED_ISLANDS_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    min_islands: int
    max_islands: int
    wanted_islands: int
    waits_for: str
    def __init__(self, min_islands: _Optional[int] = ..., max_islands: _Optional[int] = ..., wanted_islands: _Optional[int] = ..., waits_for: _Optional[str] = ...) -> None: ...

class GatewayProcessInfo(_message.Message):
    __slots__ = ("process", "pid", "queued", "active", "calls", "restarts", "host", "address")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    process: int
    pid: int
    queued: int
    active: int
    calls: int
    restarts: int
    host: str
    address: str
    def __init__(self, process: _Optional[int] = ..., pid: _Optional[int] = ..., queued: _Optional[int] = ..., active: _Optional[int] = ..., calls: _Optional[int] = ..., restarts: _Optional[int] = ..., host: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...
