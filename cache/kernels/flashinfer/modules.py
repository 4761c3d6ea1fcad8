"""The FlashInfer modules that a cache needs on a GPU, by its layout alone, and the folder of modules built ahead.

FlashInfer compiles what it lacks with ninja, which goes by times of files: it would build anew what another host has
built. So modules are kept as libraries alone, in a folder from which FlashInfer loads them as they are.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from tandem.cache.kernels.base import FLASHINFER_HEAD_DIMS
from tandem.cache.kernels.build.build_once import cache_folder, short_hash
from tandem.cache.kernels.gpu_limits import DTYPES, RANK, ROTATED
from tandem.cache.plan.kv_scales import FP8
from tandem.cache.plan.latent import LatentHeads
from tandem.cache.plan.layout import KVLayout

HOPPER = (9, 0)  # the only one that fa3 serves
ARCHS = {(8, 0): "8.0", (8, 9): "8.9", (9, 0): "9.0a", (10, 0): "10.0a", (10, 3): "10.3a"}
UNITS = 10  # files that a prefill module is compiled of: four masks, paged and ragged, and two more
LATENT_UNITS = 3
# A compiler's memory. Four fa3 modules at once, 40 compilers, did not fit into 128 GiB: decision 0057.
FA3_BYTES = 6 << 30
FA2_BYTES = 3 << 30


@dataclass(frozen=True)
class FlashInferModule:
    """One module. Names of dtypes are torch's. latent: absorbed attention over latents, of RANK and ROTATED."""

    backend: str  # fa2 or fa3
    q: str
    kv: str
    head_qk: int
    head_vo: int
    window: bool = False
    softcap: bool = False
    latent: bool = False

    @property
    def title(self) -> str:
        kinds = [name for name in ("window", "softcap", "latent") if getattr(self, name)]
        heads = str(self.head_qk) if self.head_qk == self.head_vo else f"{self.head_qk}/{self.head_vo}"
        stored = "" if self.kv == self.q else f" over {self.kv}"
        return " ".join([f"FlashInfer {self.backend} {self.q}{stored} {heads}", *kinds])

    @property
    def units(self) -> int:
        """The number of compilers that it keeps busy."""
        return LATENT_UNITS if self.latent else UNITS

    @property
    def compiler_bytes(self) -> int:
        return FA3_BYTES if self.backend == "fa3" else FA2_BYTES

    def marker(self, folder: Path) -> Path:
        """A file that says that the module lies in `folder`."""
        return folder / f"{short_hash(repr(astuple(self)).encode())}.built"


def plan_modules(
    layout: KVLayout, softcap: float | None, capability: tuple[int, int], heads: LatentHeads | None = None
) -> tuple[FlashInferModule, ...]:
    """Lists the modules that FlashInferKernels and FlashInferLatentKernels use for a layout. Empty where torch's or
    Triton's kernels serve (one plane for K and V, and heads of other sizes). heads: of latents."""
    if layout.dtype not in DTYPES:
        return ()
    best = "fa3" if capability == HOPPER else "fa2"
    own = _name(layout.dtype)
    if heads is not None:
        expanded = FlashInferModule(best, own, own, heads.key_dim + ROTATED, heads.value_dim)
        absorbed = FlashInferModule(best, own, own, RANK, ROTATED, latent=True)
        return (expanded,) if layout.stored_dtype == FP8 else (expanded, absorbed)  # Triton's, over 8 bits
    found: dict[FlashInferModule, None] = {}
    for group in layout.groups:
        if not group.kind.attended or group.planes == 1 or group.head_dim not in FLASHINFER_HEAD_DIMS:
            continue
        sizes = (group.head_dim, group.head_dim, group.keeps.window is not None, bool(softcap))
        if layout.stored_dtype == FP8:  # widened to float16, by fa2 only; gathered entries are widened first
            pairs = [("fa2", "float16", _name(FP8)), (best, own, own)]
        else:
            pairs = [("fa2", own, own), (best, own, own)]
        found |= dict.fromkeys(FlashInferModule(*pair, *sizes) for pair in pairs)
    return tuple(found)


def module_folder(arch: str) -> Path:
    """Returns the folder of modules for these versions of FlashInfer and torch. arch: as FlashInfer names its folders,
    `90a`.

    PackageNotFoundError without FlashInfer.
    """
    return cache_folder() / "flashinfer" / f"{version('flashinfer-python')}-torch{version('torch')}-{arch}"


def arch_name(capability: tuple[int, int]) -> str:
    """Returns the name in FlashInfer's environment variable, like `9.0a`."""
    return ARCHS.get(capability, ".".join(map(str, capability)))


def folder_name(archs: Sequence[str]) -> str:
    """Joins the architectures to the name of FlashInfer's folder for them."""
    return "_".join(arch.replace(".", "") for arch in sorted(archs))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
