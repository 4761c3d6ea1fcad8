"""How the layers of a group attend, whatever they keep."""

from dataclasses import dataclass

from tandem.cache.plan.arrays import check_factor
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.latent import LatentHeads


@dataclass(frozen=True)
class Heads:
    """The attention heads of a group's layers, or of all groups; see PagedKVCache."""

    scale: float | None
    softcap: float | None
    latent: LatentHeads | None

    def check(self, *, of_latents: bool) -> None:
        """InvalidArgument unless groups can have them, with latents or without."""
        for name, value in (("scale", self.scale), ("softcap", self.softcap)):
            if value is not None:
                check_factor(name, value)
        latent = self.latent
        if of_latents != (latent is not None):
            raise InvalidArgument(
                f"latent is {latent}; it must be given exactly when the layout has groups with latents"
            )
        if latent is not None and min(latent.key_dim, latent.value_dim) < 1:
            raise InvalidArgument(f"latent is {latent}; both sizes must be at least 1")
        if latent is not None and self.softcap is not None:
            raise InvalidArgument(f"softcap is {self.softcap}; with latents it must be None")

    def scale_of(self, width: int) -> float:
        """width: of q."""
        return width**-0.5 if self.scale is None else self.scale
