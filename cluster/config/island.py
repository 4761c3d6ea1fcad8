"""The section of a cluster's configuration that describes an island's workers."""

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from tandem.cluster.config.units import AnyWorkers, Ranks, Requests, Seconds, Section, Threads, Workers
from tandem.transfer.factory import TRANSPORTS
from tandem.transfer.island_ranks import MAX_GPU_RANKS, MAX_RANKS, IslandRanks


class IslandSection(Section):
    device: Literal["cpu", "cuda"] = "cpu"
    """the workers' device; on cuda each rank has its own GPU"""
    transport: str = Field(default="shared_memory", json_schema_extra={"enum": [*TRANSPORTS]}, validate_default=True)
    """how workers write into each other's pages. On CPUs: shared_memory, or tcp, also between hosts. On GPUs: nvshmem,
    on one host. On both: nixl, also between hosts, without encryption"""
    num_prefill: AnyWorkers = Field(default=1, le=256)
    """prefill workers; with adaptive or colocated scheduler.roles it may be 0: decode workers then compute all prompts,
    and one GPU is enough for an island"""
    num_decode: Workers = Field(default=1, le=256)
    """decode workers"""
    prefill_ranks: Ranks = Field(default=1, le=MAX_RANKS)
    """processes of each prefill worker, all on one host (vLLM's tensor parallel size). Each has a part of the model's
    heads, experts and columns, and on cuda its own GPU; at most 8 on cuda"""
    decode_ranks: Ranks = Field(default=1, le=MAX_RANKS)
    """processes of each decode worker; may differ from prefill_ranks"""
    num_signals: Requests | None = Field(default=None, le=1 << 16)
    """most requests whose KV one decode worker awaits at a time; null is scheduler.max_sequences"""
    lease_seconds: Seconds = Field(default=30.0, ge=0.05, le=3600)
    """how long workers keep a silent gateway's pages and requests"""
    verify_kv: bool = False
    """whether decode workers verify digests of the KV pushed to them"""
    network: Literal["auto", "loopback", "node"] = "auto"
    """how the gateway reaches workers. loopback: on its own host only; node: at their hosts' addresses with mutual TLS;
    auto: node if Ray has several hosts when the cluster starts"""
    span_hosts: bool = False
    """whether an island's workers are spread over all hosts, with tcp or nixl; false puts them on one host. The ranks
    of a worker always share a host"""
    node_resources: dict[str, float] = Field(default={}, max_length=64)
    """Ray resources, and how many of each, that a host must have for an island"""
    node_labels: dict[str, str] = Field(default={}, max_length=64)
    """Ray labels, with their values, that a host must have for an island"""
    threads_per_worker: Threads | None = Field(default=None, le=1024)
    """threads of one worker; null divides its host's cores equally among the host's workers, as num_islands islands are
    spread over the hosts"""

    @property
    def ranks(self) -> IslandRanks:
        """The processes of each worker, prefill workers first."""
        return IslandRanks([self.prefill_ranks] * self.num_prefill + [self.decode_ranks] * self.num_decode)

    @field_validator("prefill_ranks", "decode_ranks")
    @classmethod
    def _fit_computing(cls, ranks: int, info: ValidationInfo) -> int:
        if ranks > MAX_GPU_RANKS and info.data.get("device") == "cuda":
            raise ValueError(f"must be at most {MAX_GPU_RANKS} where island.device is cuda")
        return ranks

    @field_validator("transport")
    @classmethod
    def _fit_device(cls, transport: str, info: ValidationInfo) -> str:
        if transport not in TRANSPORTS:
            raise ValueError(f"must be {' or '.join(TRANSPORTS)}")
        device = info.data.get("device", *TRANSPORTS[transport].devices[:1])  # an invalid device is named by itself
        if device not in TRANSPORTS[transport].devices:
            fitting = " or ".join(name for name, one in TRANSPORTS.items() if device in one.devices)
            raise ValueError(f"must be {fitting} where island.device is {device}")
        return transport

    @field_validator("span_hosts")
    @classmethod
    def _fit_transport(cls, span_hosts: bool, info: ValidationInfo) -> bool:
        fitting = [name for name, one in TRANSPORTS.items() if one.spans_hosts]
        if span_hosts and (
            info.data.get("transport", *fitting[:1]) not in fitting or info.data.get("network") == "loopback"
        ):
            raise ValueError(
                f"must be false unless island.transport is {' or '.join(fitting)} and island.network is not loopback"
            )
        return span_hosts
