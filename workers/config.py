"""Everything one worker process needs to know to start, as one value that the control plane sends it."""

import math
from dataclasses import dataclass, field
from enum import StrEnum

from tandem.transfer.island_ranks import IslandRanks
from tandem.workers.logs import LogSettings

MESSAGE_BYTES = 16 << 20  # what a message may have besides a prompt
TOKEN_SHARE = 0.9  # of tokens that come within token_seconds


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True)
class SpeculationSettings:
    """Whether decode steps verify drafts, and of whom.

    draft: folder of the model that drafts, where one does. tokens: most of a draft. max_step_tokens: most of a verify
    step, drafted ones and one for each sequence. max_ngram: tokens that a place of the context shares with its end, at
    most.
    """

    method: str = "none"
    tokens: int = 0
    max_step_tokens: int = 0
    max_ngram: int = 0
    draft: str = ""


@dataclass(frozen=True)
class ParkingSettings:
    """most: sequences that are parked at a time; 0: none is. seconds: after so long, nothing else gets room before a
    parked sequence. reserved_output: the part of its longest output that a request has room for from the beginning."""

    most: int = 0
    seconds: float = 60.0
    reserved_output: float = 1.0


@dataclass(frozen=True)
class AdapterSettings:
    """max_resident: LoRA adapters that are on the device at a time; 0: the worker serves none. max_rank: of an adapter.
    host_bytes: of host memory for all that are held, over all ranks of the worker."""

    max_resident: int = 0
    max_rank: int = 16
    host_bytes: int = 4 << 30


@dataclass(frozen=True)
class RecordSettings:
    """The record of a worker's actions. max_bytes: of a file; a record that is full ends. prompts: whether it has token
    ids."""

    folder: str
    max_bytes: int = 256 << 20
    prompts: bool = False


@dataclass(frozen=True)
class WorkerConfig:
    """Plain values only: it travels to the worker's process.

    lease_seconds: how long a decode worker keeps a reservation that nobody starts, and how long a connection may be
    silent before its calls count as gone. silent_seconds: the same for connections, where that is longer: between hosts
    a link may be down for a while. kv_cache_dtype: auto or fp8_e4m3; k_scale, v_scale: of an FP8 cache, None takes the
    checkpoint's. verify_kv: whether digests of pushed KV are compared. These four are the same on every PE. host_bytes:
    of host memory for evicted prefixes, over all ranks of the worker; 0: none; None: see with_host_bytes().
    verify_host: whether pages that come back are compared with what was stored. parked_bytes: of host memory for parked
    sequences, over all ranks of a worker that decodes; None: none is parked. parking: when sequences are parked.
    disk_path: a folder for pages without room in host memory, in which each rank has its own; None: none. disk_bytes:
    of it, over all ranks of the worker. token: what every call to the worker must carry. threads: None takes an even
    part of the host's cores, which `workers_on_host` share, or torch's own choice where that is None, too.
    decode_workers: the island's, if this worker is one. They share all threads of the island while no prompt is on its
    way to them.

    role: what the worker is mainly for. It computes prompts and decodes whatever its role is. adaptive: it often does
    both, so CUDA graphs of both are captured. token_seconds: how long a sequence may wait for its next token because of
    prompts; None sets no bound. token_share: how many of its tokens are to come in that time. priority_seconds: after
    so long, a waiting request counts with the next lower priority. record: None records nothing. ranks: how many
    processes make up each worker of the island, each with a shard of the model; none where all have one. rank: this
    process's; rank 0 leads. epochs: of each PE, 0 for a vacant place, if the island has one or this worker joins others
    that serve; none where all have `epoch`.
    """

    role: Role
    island: str
    epoch: int
    pe: int
    num_pes: int
    model_path: str
    max_model_len: int
    token: str = field(repr=False)
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    k_scale: float | None = None
    v_scale: float | None = None
    device: str = "cpu"
    load_format: str = "safetensors"
    page_size: int = 16
    prefix_sharing: bool = True
    state_interval: int | None = 512
    state_share: float = 0.25
    host_bytes: int | None = None
    verify_host: bool = False
    disk_path: str | None = None
    disk_bytes: int | None = None
    parked_bytes: int | None = None
    max_batch_tokens: int = 1024
    max_sequences: int = 256
    transport: str = "shared_memory"
    num_signals: int = 256
    lease_seconds: float = 30.0
    silent_seconds: float = 0.0
    verify_kv: bool = False
    threads: int | None = None
    workers_on_host: int | None = None
    decode_workers: int | None = None
    max_stream_messages_per_second: float = math.inf
    adaptive: bool = False
    token_seconds: float | None = None
    token_share: float = TOKEN_SHARE
    priority_seconds: float = 30.0
    parking: ParkingSettings = ParkingSettings()
    speculation: SpeculationSettings = SpeculationSettings()
    adapters: AdapterSettings = AdapterSettings()
    logging: LogSettings = field(default_factory=LogSettings)
    record: RecordSettings | None = None
    rank: int = 0
    ranks: tuple[int, ...] = ()
    epochs: tuple[int, ...] = ()

    @property
    def parks(self) -> bool:
        """Whether sequences are parked here: this worker decodes, and has host memory for them."""
        return self.parked_bytes is not None and (self.adaptive or self.role == Role.DECODE)

    @property
    def island_ranks(self) -> IslandRanks:
        """The ranks of all workers, also where each has one."""
        return IslandRanks(self.ranks or (1,) * self.num_pes)


@dataclass(frozen=True)
class LoopSettings:
    """The settings of a worker that its step loop needs."""

    lease_seconds: float  # how long a reservation and a speculative prompt are kept
    sharing: bool  # whether prompts with the same beginning share its pages
    verify: bool = False  # whether a digest of the pushed KV goes with the signal and is compared
    max_batch_tokens: int = 1024  # new tokens of a step
    max_sequences: int = 256  # between reservation and last token
    eos_token_ids: tuple[int, ...] = ()
    token_seconds: float | None = None  # from one token of a row to its next, with prompts; None: no bound
    token_share: float = TOKEN_SHARE  # of the times from one token to the next that are to keep it
    priority_seconds: float = 30.0  # after which what waits counts with the next lower priority
    parking: ParkingSettings = ParkingSettings()
    speculation: SpeculationSettings = SpeculationSettings()

    @classmethod
    def of(cls, config: WorkerConfig, *, sharing: bool, eos_token_ids: tuple[int, ...]) -> "LoopSettings":
        """Takes the settings from a worker's configuration."""
        return cls(
            max_batch_tokens=config.max_batch_tokens,
            max_sequences=config.max_sequences,
            sharing=sharing,
            verify=config.verify_kv,
            lease_seconds=config.lease_seconds,
            eos_token_ids=eos_token_ids,
            token_seconds=config.token_seconds,
            token_share=config.token_share,
            priority_seconds=config.priority_seconds,
            parking=config.parking if config.parks else ParkingSettings(),
            speculation=config.speculation,
        )


def max_message_bytes(max_model_len: int) -> int:
    """Returns the most bytes of a message between gateway and worker. It carries a prompt as 4 bytes a token, whatever
    a client sent."""
    return MESSAGE_BYTES + 4 * max_model_len
