"""The section of a cluster's YAML about KV pages, and where they go."""

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from tandem.cluster.config.paths import ResolvedPath
from tandem.cluster.config.units import AnyBytes, Bytes, Factor, Fraction, Pages, Positions, Section, Share


class CacheSection(Section):
    page_size: Literal[8, 16, 32, 64, 128] = Field(default=16, json_schema_extra={"unit": "positions"})
    """positions in one KV page; on a GPU at most 64 in 16 bits; must divide the attention chunks of Llama 4"""
    num_pages: Pages | None = Field(default=None, le=1 << 24)
    """KV pages in each worker's pool, the same on every worker; null is 1024 on a CPU, and on a GPU as many as
    gpu_memory_utilization allows"""
    gpu_memory_utilization: Fraction | None = None
    """fraction of a GPU's memory that weights, KV pages and workspace may take; null is 0.9, unless num_pages is
    given"""
    kv_cache_dtype: Literal["auto", "fp8_e4m3"] = "auto"
    """element type of stored K and V, latents and index keys; auto is model.dtype, or FP8 if the checkpoint says so"""
    k_scale: Factor | None = Field(default=None, allow_inf_nan=False)
    """with fp8_e4m3, the factor of stored K in every layer; null takes the checkpoint's scales, or 1. Must be null for
    latents, which carry their own scales"""
    v_scale: Factor | None = Field(default=None, allow_inf_nan=False)
    """the same for V"""
    prefix_sharing: bool = True
    """whether requests share the pages of equal prefixes"""
    state_interval: Positions | None = 512
    """positions between two snapshots of recurrent states. A cached prefix of such a model ends at a snapshot; another
    one is taken at the last full page. Must be a multiple of page_size; null takes none, so no prefix of such a model
    is cached"""
    state_share: Share = Field(default=0.25, ge=0, le=1)
    """memory for snapshots of recurrent states, as a fraction of the memory of KV pages; if above 0, at least one
    snapshot for each 16 of max_sequences + 8 states"""
    host_bytes: AnyBytes | None = Field(default=None, le=1 << 44)
    """host memory of each worker for evicted prefixes. The worker copies them back when a prompt begins with one,
    unless computing is faster. 0 keeps none. null keeps none on CPUs, and on a GPU host a quarter of its memory,
    divided among its workers, at most 64 GiB each. Must fit in the host's memory, or in its control group's limit"""
    verify_host: bool = False
    """whether workers compare pages that come back from host memory with what they copied. They compute pages that
    differ again"""
    disk_path: ResolvedPath | None = None
    """folder on each host for prefixes that do not fit in host memory, with a subfolder for each worker; needs
    host_bytes and disk_bytes. A restarted worker uses what it finds there if weights and settings are the same; null
    keeps none"""
    disk_bytes: Bytes | None = Field(default=None, le=1 << 50, validate_default=True)
    """most bytes of each worker's files there"""
    parked_bytes: Bytes | None = Field(default=None, le=1 << 44)
    """host memory of each decode worker for parked sequences: running ones that give up their pages to a request whose
    priority has a lower number; null parks none"""

    @field_validator("disk_bytes")
    @classmethod
    def _with_a_path(cls, num_bytes: int | None, info: ValidationInfo) -> int | None:
        if num_bytes is None and info.data.get("disk_path") is not None:
            raise ValueError("must be a number of bytes where cache.disk_path is a folder")
        return num_bytes

    @field_validator("state_interval")
    @classmethod
    def _whole_pages(cls, interval: int | None, info: ValidationInfo) -> int | None:
        page_size = info.data.get("page_size")
        if interval is not None and page_size is not None and interval % page_size:
            raise ValueError(f"must be a multiple of cache.page_size, {page_size}, or null")
        return interval

    @field_validator("gpu_memory_utilization")
    @classmethod
    def _alone(cls, utilization: float | None, info: ValidationInfo) -> float | None:
        num_pages = info.data.get("num_pages")
        if utilization is not None and num_pages is not None:
            raise ValueError(
                f"must be null where cache.num_pages is given, here {num_pages}: one follows from the other"
            )
        return utilization

    @field_validator("k_scale", "v_scale")
    @classmethod
    def _of_fp8(cls, scale: float | None, info: ValidationInfo) -> float | None:
        if scale is not None and info.data.get("kv_cache_dtype") != "fp8_e4m3":
            raise ValueError("must be null unless cache.kv_cache_dtype is fp8_e4m3")
        return scale
