"""The sections of a cluster's YAML: keys, their types, limits and defaults."""

from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from tandem.cluster.config.model import find_model, model_name, model_root
from tandem.cluster.config.nodes import GatewayNodes
from tandem.cluster.config.paths import ResolvedPath
from tandem.cluster.config.units import (
    Calls,
    Cpus,
    Fraction,
    Hosts,
    Mebibytes,
    Messages,
    Placements,
    Port,
    Positions,
    Processes,
    Requests,
    Restarts,
    Seconds,
    Section,
    Sequences,
    Share,
    Tokens,
)
from tandem.cluster.credentials import ServerSecurity
from tandem.cluster.keys.key_file import read_keys
from tandem.cluster.routing.policy import POLICIES
from tandem.workers.config import TOKEN_SHARE, RecordSettings
from tandem.workers.logs import LogSettings


def _names(value: object) -> object:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError("must be a name, or a list of names")
    return names


ModelPath = Annotated[str, AfterValidator(find_model)]
Names = Annotated[list[str], BeforeValidator(_names), Field(json_schema_extra={"accepted": "text, or a list of texts"})]


class ModelSection(Section):
    path: ModelPath | None = None
    """folder of a Hugging Face checkpoint, or the hub id of one in the Hugging Face cache, such as Qwen/Qwen3-8B; `~`
    and relative paths are resolved"""
    served_model_name: Names | None = None
    """the model's name for clients, or a list of names: requests may use any of them, answers carry the first; null is
    the hub id or the folder's name"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """element type of weights and KV; auto takes config.json's, or the stored weights' if config.json has none"""
    load_format: Literal["safetensors", "dummy"] = "safetensors"
    """source of the weights; dummy makes random weights and needs only config.json"""
    generation_config: Literal["auto", "none"] = "auto"
    """default temperature, top_p, top_k, min_p and repetition_penalty of requests: auto takes the checkpoint's
    generation_config.json; none takes the protocol's defaults"""
    max_model_len: Positions | None = Field(default=None, le=1 << 24)
    """most positions of one sequence, if the pages hold that many; null takes the checkpoint's limit, multiplied by the
    factor of a RoPE of type linear, dynamic or yarn"""

    @property
    def names(self) -> list[str]:
        """The model's names for clients; answers carry the first."""
        return self.served_model_name or [model_name(self.path or "")]

    @property
    def root(self) -> str:
        """The place where clients find the tokenizer: see model_root()."""
        return model_root(self.path or "")


class SchedulerSection(Section):
    roles: Literal["split", "adaptive", "colocated"] = "split"
    """roles of workers. split: prefill workers compute prompts, and decode workers decode. adaptive: the router chooses
    the workers of each request by their loads. colocated: each worker does both for its own requests"""
    max_batch_tokens: Tokens = Field(default=1024, le=1 << 20)
    """most tokens in one forward"""
    max_sequences: Sequences | None = Field(default=None, le=1 << 16)
    """most sequences in one forward; null is 512 on a GPU and 256 on a CPU"""
    token_seconds: Seconds | None = Field(default=None, gt=0, le=60)
    """longest wait of a sequence for its next token while its worker also computes prompts; a shorter wait slows
    prompts down; null is 0.015 on a GPU, and no bound on a CPU"""
    first_token_seconds: Seconds | None = Field(default=None, gt=0, le=80)
    """target for the first token, from a request's arrival. Workers first compute the prompts that can still be in
    time, and give one prompt token in eight to others. A request may have its own target; null computes prompts in
    order of arrival"""
    token_share: Share = Field(default=TOKEN_SHARE, gt=0.5, lt=1)
    """fraction of a sequence's tokens that should come within token_seconds; a larger fraction slows prompts down"""
    priority_seconds: Seconds = Field(default=30.0, gt=0, le=86400)
    """how long a request waits before each rise by one priority, so that none starves"""
    max_parked: Sequences = Field(default=256, le=1 << 16)
    """most sequences that a worker parks at a time; see cache.parked_bytes"""
    parked_seconds: Seconds = Field(default=60.0, ge=0, le=86400)
    """how long a sequence is parked before it goes ahead of all requests that wait for its worker"""
    reserved_output: Fraction = 1.0
    """fraction of max_tokens for which a decode worker reserves pages when a request begins. Below 1, requests take
    more pages as they grow; when pages run out, the worker parks the latest requests"""
    stream_messages_per_second: Messages | None = Field(default=None, le=1 << 20)
    """most messages to the clients of one decode worker; with more tokens than that, a message carries several; null is
    400 on a CPU, which also computes, and on a GPU as many as the gateway can write"""


Origin = Annotated[str, Field(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^\sA-Z/,*]+)$")]
Priorities = Annotated[
    list[Annotated[int, Field(ge=-1000, le=1000)]],
    Field(min_length=2, max_length=2, json_schema_extra={"accepted": "two integers"}),
]
Origins = Annotated[list[Origin], Field(max_length=64, json_schema_extra={"accepted": "a list of texts"})]


class GatewaySection(GatewayNodes):
    port: Port = 50051
    """gRPC port; 0 takes any free one"""
    http_port: Port | None = None
    """port of the OpenAI-compatible HTTP server; 0 takes any free one; null starts none"""
    routing_policy: str = Field(default="prefix_aware", json_schema_extra={"enum": [*POLICIES]})
    """how workers with split roles are chosen: by load, or also by their cached prefixes of the prompt"""
    cors_origins: Origins = Field(default=[])
    """origins of web pages that may call the HTTP server from a browser, such as https://chat.example and
    http://localhost:3000, in lower case and without a path; "*" allows all"""
    processes: Processes | None = Field(default=None, le=64)
    """gateway processes of a host, sharing ports and limits; null is 1 for each 4 cores, at least 1 and at most 4"""
    max_queued: Requests = Field(default=1024, le=1 << 20)
    """most requests that wait for room"""
    max_queued_tokens: Tokens = Field(default=1 << 22, le=1 << 40)
    """most tokens, prompts and outputs, that wait for room"""
    max_sliding_tokens: Tokens = Field(default=1 << 20, le=1 << 31)
    """most tokens, prompt and output, of a request with `sliding`, which may be longer than the model's context"""
    priorities: Priorities = Field(default=[0, 10])
    """the lowest and the highest `priority` that a request may have. Lower numbers are served first; 0 is the default.
    If the lowest is below 0, any client can overtake others"""
    max_attempts: Placements = Field(default=5, le=1000)
    """most placements of a request whose workers are lost while they serve it"""
    queue_seconds: Seconds = Field(default=60.0, gt=0, le=86400)
    """longest wait for room"""
    request_seconds: Seconds = Field(default=600.0, gt=0, le=86400)
    """longest duration of one request"""
    max_message_mib: Mebibytes | None = Field(default=None, le=1024)
    """largest message or body; null is 4, or 32 bytes for each token of the model's context if that is more, at most
    16"""
    max_bodies_mib: Mebibytes = Field(default=512, le=1 << 20)
    """most bytes of requests that are being received or parsed, without requests of up to 64 KiB. The gateway processes
    of a host have equal parts, and one client's host may use half of a part"""
    max_calls: Calls = Field(default=4096, le=1 << 20)
    """most calls at a time, gRPC and HTTP together, waiting ones included"""
    tool_parser: Literal[
        "auto", "none", "harmony", "tagged", "llama3_json", "mistral", "deepseek", "phi4_mini", "pythonic"
    ] = "auto"
    """format of the model's tool calls; auto finds it in the checkpoint's chat template"""
    reasoning_parser: Literal["auto", "none", "harmony", "think", "mistral"] = "auto"
    """format of the model's reasoning before its answer; auto finds it in the checkpoint's chat template"""
    drain_seconds: Seconds = Field(default=0.0, ge=0, le=3600)
    """how long the gateway still serves, but reports that it is not ready, once it is told to stop"""
    warm_up: bool | None = None
    """whether the gateway sends requests of its own to new workers before it is ready. Clients' first requests then
    find kernels compiled and connections open; null is true on a GPU"""

    @field_validator("routing_policy")
    @classmethod
    def _known_policy(cls, policy: str) -> str:
        if policy not in POLICIES:
            raise ValueError(f"must be {' or '.join(POLICIES)}")
        return policy

    @field_validator("priorities")
    @classmethod
    def _around_the_default(cls, priorities: list[int]) -> list[int]:
        first, last = priorities
        if not first <= 0 <= last:
            raise ValueError("must have a first priority of at most 0 and a last one of at least 0")
        return priorities

    @field_validator("http_port")
    @classmethod
    def _another_port(cls, http_port: int | None, info: ValidationInfo) -> int | None:
        if http_port and http_port == info.data.get("port"):
            raise ValueError("must be another one than gateway.port")
        return http_port


class MetricsSection(Section):
    enabled: bool = True
    """whether requests are counted, and /metrics is served"""
    port: Port | None = None
    """separate port for /metrics, /ready and /health; 0 takes any free one; null serves them on gateway.http_port"""
    host: str = "127.0.0.1"
    """address that metrics.port listens on"""
    public: bool = False
    """whether /metrics needs no token, and is served under any host name"""


class LoggingSection(Section):
    access: bool = False
    """whether gateway processes log a line for each finished request"""
    format: Literal["text", "json"] = "text"
    """format of all processes' logs: lines of text, or one JSON object a line"""
    folder: ResolvedPath | None = None
    """folder on each host with a log file for each worker and gateway process; null is stderr, which Ray keeps"""

    @property
    def settings(self) -> LogSettings:
        """The settings that processes take."""
        return LogSettings(self.access, self.format, self.folder)


class TracingSection(Section):
    keep: Annotated[int, Field(json_schema_extra={"unit": "requests"})] = Field(default=0, ge=0, le=1 << 16)
    """finished requests whose spans each gateway process keeps for `tandem trace`; 0 keeps none"""
    endpoint: Annotated[str, Field(pattern=r"^https?://[^\s/]+\S*$")] | None = None
    """URL for spans, by OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces; needs the extra `tracing`"""
    sample_ratio: Fraction = 1.0
    """fraction of requests whose spans go to endpoint, unless the caller's traceparent decides"""


class RecordSection(Section):
    folder: ResolvedPath | None = None
    """folder on each host with a record of each worker's actions, for `tandem replay`; null records nothing"""
    max_mib: Mebibytes = Field(default=256, le=1 << 20)
    """largest record of a worker; a full record ends"""
    prompts: bool = False
    """whether records hold the token ids of prompts and answers; without them a replay compares only pages and
    pushes"""

    @property
    def settings(self) -> RecordSettings | None:
        """The settings that workers get; None if nothing is recorded."""
        return None if self.folder is None else RecordSettings(self.folder, self.max_mib << 20, self.prompts)


class SecuritySection(Section):
    """Access to the gateway. Anyone who can reach it may use it, unless it asks for a token."""

    token_file: ResolvedPath | None = None
    """file with the bearer token that every call must carry; readable by its owner only"""
    api_key: SecretStr | None = None
    """the bearer token itself, in place of token_file; better in TANDEM_SECURITY__API_KEY than in a file"""
    keys_file: ResolvedPath | None = None
    """YAML file of callers' keys with their limits, read again when it changes; the token is then the operator's"""
    tls_cert: ResolvedPath | None = None
    """the gateway's certificate chain, PEM"""
    tls_key: ResolvedPath | None = None
    """the key of tls_cert, PEM; readable by its owner only"""
    client_ca: ResolvedPath | None = None
    """PEM; clients must then show a certificate that it signed (mutual TLS)"""
    tls_at_proxy: bool = False
    """whether TLS ends at a proxy in front of the gateway. With a token, the gateway then listens on any address
    without TLS; only the proxy must be able to reach it"""
    salt_by_token: bool = False
    """whether callers share cached prefixes only with callers of the same bearer token"""

    @property
    def server(self) -> ServerSecurity:
        """The settings that the gateway takes."""
        key = None if self.api_key is None else self.api_key.get_secret_value()
        return ServerSecurity(**self.model_dump(exclude={"api_key", "keys_file", "tls_at_proxy"}), api_key=key)

    def check(self) -> None:
        """ConfigError for a file that cannot be read or used."""
        self.server.check()
        if self.keys_file is not None:
            read_keys(self.keys_file)

    @property
    def is_keyed(self) -> bool:
        """True if callers must show a token."""
        return self.token_file is not None or self.api_key is not None

    @property
    def is_guarded(self) -> bool:
        """True if the gateway may listen on a network."""
        return self.is_keyed and (self.tls_cert is not None or self.tls_at_proxy)

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.api_key is not None and self.token_file is not None:
            raise ValueError("must have token_file or api_key, not both")
        if self.keys_file is not None and not self.is_keyed:
            raise ValueError("must have token_file or api_key, the operator's token, where keys_file is set")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("must have both tls_cert and tls_key, or neither")
        if self.client_ca is not None and self.tls_cert is None:
            raise ValueError("must have tls_cert and tls_key where client_ca is set")
        if self.tls_at_proxy and self.tls_cert is not None:
            raise ValueError("must have tls_at_proxy or tls_cert, not both: with tls_cert the gateway has TLS itself")
        if self.tls_at_proxy and not self.is_keyed:
            raise ValueError("must have token_file or api_key where tls_at_proxy is true")
        return self


class RecoverySection(Section):
    unresponsive_seconds: Seconds = Field(default=60.0, gt=0, le=86400)
    """a process that is silent for this long is ended and started again"""
    stalled_seconds: Seconds = Field(default=300.0, gt=0, le=86400)
    """a process whose start makes no progress for this long, in imports, weights or kernels, is ended and started
    again. It must be longer than one kernel takes to compile. While workers wait for each other, the limit is at most
    60 s"""
    partition_seconds: Seconds = Field(default=10.0, ge=1, le=3600)
    """a link between hosts may be down for this long at the cost of a pause. A host that is silent for twice this time
    and a second is cut off: its workers end themselves, and three seconds later their island starts on other hosts"""
    drain_seconds: Seconds = Field(default=10.0, ge=0, le=86400)
    """longest wait for requests that a broken island's other workers, or a leaving worker, can still finish"""
    max_restarts: Restarts = Field(default=10, le=1 << 20)
    """most restarts of an island, or of the gateway, in window_seconds; one more loss ends the cluster"""
    window_seconds: Seconds = Field(default=600.0, gt=0, le=86400)
    """the time over which restarts are counted"""

    @property
    def silent_seconds(self) -> float:
        """Longest silence between hosts. TCP retries after pauses that double, so a link that was down may stay silent
        for twice the time."""
        return 2 * self.partition_seconds + 1

    @property
    def cut_off_seconds(self) -> float:
        """The silence after which a host counts as cut off. Its workers end themselves before, after silent_seconds."""
        return self.silent_seconds + 3


class RaySection(Section):
    num_cpus: Cpus | None = Field(default=None, le=1 << 16)
    """CPUs of a Ray that `tandem up` starts; null is all. Each process of a worker or gateway takes 0.1, which limits
    only their number. Set a worker's threads with island.threads_per_worker"""
    min_hosts: Hosts = Field(default=1, le=256)
    """hosts for islands that must have joined the Ray of --address before anything starts"""
    join_seconds: Seconds = Field(default=300.0, ge=0, le=86400)
    """how long a start waits for min_hosts"""
