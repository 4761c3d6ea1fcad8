"""The section of a cluster's configuration that describes an island's workers."""

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from tandem.cluster.config.units import AnyWorkers, Ranks, Requests, Seconds, Section, Threads, Workers
from tandem.transfer.factory import TRANSPORTS
from tandem.transfer.island_ranks import MAX_GPU_RANKS, MAX_RANKS, IslandRanks


class IslandSection(Section):
    device: Literal["cpu", "cuda"] = "cpu"
    """where workers compute; on cuda each has a GPU of its own"""
    transport: str = Field(default="shared_memory", json_schema_extra={"enum": [*TRANSPORTS]}, validate_default=True)
    """how workers write into each other's pages: CPUs by shared_memory or, between hosts, tcp; GPUs by nvshmem;
    either by nixl, between hosts, too, in the clear"""
    num_prefill: AnyWorkers = Field(default=1, le=256)
    """prefill workers; 0 where scheduler.roles is adaptive or colocated: decode workers compute all prompts then, and
    one GPU makes an island"""
    num_decode: Workers = Field(default=1, le=256)
    """decode workers"""
    prefill_ranks: Ranks = Field(default=1, le=MAX_RANKS)
    """processes of each prefill worker, on one host, each with a part of the model's heads, experts and columns, on
    cuda each with a GPU, 8 at most; vLLM and SGLang call their number the tensor parallel size"""
    decode_ranks: Ranks = Field(default=1, le=MAX_RANKS)
    """processes of each decode worker; they may be more or fewer than those of a prefill worker"""
    num_signals: Requests | None = Field(default=None, le=1 << 16)
    """requests whose KV one decode worker can await at a time; null is scheduler.max_sequences"""
    lease_seconds: Seconds = Field(default=30.0, ge=0.05, le=3600)
    """how long workers keep pages and work on for a gateway that shows no sign of life"""
    verify_kv: bool = False
    """whether decode workers compare digests of the KV pushed to them"""
    network: Literal["auto", "loopback", "node"] = "auto"
    """how the gateway reaches workers: loopback, on its own host only; node, at their hosts' addresses with mutual TLS;
    auto, node where Ray has several hosts when the cluster starts"""
    span_hosts: bool = False
    """whether an island's workers go to as many hosts as there are, by tcp or nixl; false puts them onto one host; the
    ranks of a worker always share one"""
    node_resources: dict[str, float] = Field(default={}, max_length=64)
    """Ray's resources that a host must have for an island, and how many"""
    node_labels: dict[str, str] = Field(default={}, max_length=64)
    """Ray's labels that a host must have for an island, and their values"""
    threads_per_worker: Threads | None = Field(default=None, le=1024)
    """threads of one worker; null shares the cores of its host evenly among the workers that num_islands, spread over
    the hosts, bring there"""

    @property
    def ranks(self) -> IslandRanks:
        """The processes of each worker, prefill workers first."""
        return IslandRanks([self.prefill_ranks] * self.num_prefill + [self.decode_ranks] * self.num_decode)

    @field_validator("prefill_ranks", "decode_ranks")
    @classmethod
    def _fit_computing(cls, ranks: int, info: ValidationInfo) -> int:
        if ranks > MAX_GPU_RANKS and info.data.get("device") == "cuda":
            raise ValueError(f"must be at most {MAX_GPU_RANKS} where island.device is cuda")
        transport = info.data.get("transport", "nvshmem")
        if ranks > 1 and info.data.get("device") == "cuda" and transport != "nvshmem":
            raise ValueError(f"must be 1 where island.device is cuda and island.transport {transport}: take nvshmem")
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
