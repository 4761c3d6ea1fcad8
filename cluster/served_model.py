"""The served model as a gateway sees it."""

from dataclasses import dataclass, replace
from pathlib import Path

from tandem.cluster.config.cluster_config import ClusterConfig
from tandem.cluster.requests.model_limits import ModelLimits


@dataclass(frozen=True)
class ServedModel:
    """The facts that the launcher finds in the checkpoint and in the workers' pools. Gateways get it, and need no
    torch."""

    architecture: str
    dtype: str  # of weights and activations, by torch's name
    num_layers: int
    kv_bytes_per_token: int  # of all layers, the drafter's too
    eos_token_ids: tuple[int, ...]
    limits: ModelLimits
    quantization: str = ""  # of weights; empty: they have none

    @property
    def num_pages(self) -> int:
        """The number of pages in each worker's pool."""
        return self.limits.pool_tokens // self.limits.page_size

    def with_pages(self, num_pages: int) -> "ServedModel":
        """Returns the model for workers whose pools have so many pages."""
        return replace(self, limits=replace(self.limits, pool_tokens=num_pages * self.limits.page_size))

    @classmethod
    def of_config(cls, config: ClusterConfig, max_model_len: int, num_pages: int = 0) -> "ServedModel":
        """num_pages: 0 until the workers know it. ModelError for a checkpoint that is not served. Imports torch."""
        from tandem.cache.plan.kv_scales import KVScales
        from tandem.workers.checkpoint.tokenizer_files import end_tokens
        from tandem.workers.models.drafters.drafter_config import load_drafter_config
        from tandem.workers.models.kv_scales import stores_fp8
        from tandem.workers.models.registry import load_config
        from tandem.workers.runner.model_cache import kv_layout

        cache, folder = config.cache, Path(config.model.path or "")
        model = load_config(folder, config.model.dtype)
        drafter = load_drafter_config(config.speculation.settings, model)
        num_layers = model.num_layers + (0 if drafter is None else drafter.num_layers)
        # The scales do not change the size.
        scales = KVScales.uniform(num_layers) if stores_fp8(cache.kv_cache_dtype, model) else None
        first, last = config.gateway.priorities
        limits = ModelLimits.of_model(
            model,
            max_model_len,
            num_pages,
            cache.page_size,
            config.gateway.max_sliding_tokens,
            config.scheduler.max_batch_tokens,
            (first, last),
        )
        return cls(
            model.architecture,
            str(model.dtype).removeprefix("torch."),
            model.num_layers,
            kv_layout(model, cache.page_size, scales, drafter).token_bytes,
            end_tokens(folder, model.eos_token_ids, model.vocab_size),
            limits,
            model.quantization.weights or "",
        )
