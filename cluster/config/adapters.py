"""The section of a cluster's configuration that says which LoRA adapters it serves."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from tandem.cluster.adapters.values import check_name
from tandem.cluster.config.model import find_model, usable_path
from tandem.cluster.config.units import Adapters, AnyAdapters, ManyBytes, Ranks, Section
from tandem.workers.config import AdapterSettings

NAMES = 4096  # that a cluster may know at a time: each gateway process keeps them all


def _root(path: str) -> str:
    return str(Path(usable_path(path)).expanduser().resolve())


Name = Annotated[str, AfterValidator(check_name)]
Folder = Annotated[str, AfterValidator(find_model)]


class AdaptersSection(Section):
    """LoRA adapters over the served model. Requests name one as their model."""

    max_resident: AnyAdapters = Field(default=0, le=256)
    """most adapters that a worker has on its device at a time, as vLLM's --max-loras; 0: no adapter is served"""
    max_rank: Ranks = Field(default=16, le=512)
    """largest rank of an adapter, as vLLM's --max-lora-rank; each resident adapter takes the memory of this rank"""
    host_bytes: ManyBytes = 4 << 30
    """host memory of each worker for the adapters that it holds; an adapter that is not resident is copied from
    there"""
    max_adapters: Adapters = Field(default=256, le=NAMES)
    """most adapters that the cluster serves at a time, including `folders`"""
    folders: dict[Name, Folder] = Field(default={}, max_length=NAMES)
    """folders of PEFT adapters, or hub ids as in model.path, by the names that requests give; loaded at the start, as
    vLLM's --lora-modules"""
    allowed_root: Annotated[str, AfterValidator(_root)] | None = None
    """folder under which adapters may be added while the cluster runs; null allows only `folders`"""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if len(self.folders) > self.max_adapters:
            raise ValueError(
                f"must have folders of at most max_adapters, {self.max_adapters}; here are {len(self.folders)}"
            )
        return self

    @property
    def settings(self) -> AdapterSettings:
        """The settings that workers get."""
        return AdapterSettings(self.max_resident, self.max_rank, self.host_bytes)

    @property
    def is_on(self) -> bool:
        """True if workers take adapters."""
        return self.max_resident > 0
