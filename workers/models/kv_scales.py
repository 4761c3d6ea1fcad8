"""The choice of a worker to store K and V, or latents, in 8 bits, and of the scales of K and V."""

from pathlib import Path

from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.kv_scales import KVScales
from tandem.workers.checkpoint.weight_files import weight_files
from tandem.workers.config import WorkerConfig
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.scale_tensors import read_scales

KV_CACHE_DTYPES = ("auto", "fp8_e4m3")


def stores_fp8(kv_cache_dtype: str, model: ModelConfig) -> bool:
    """auto: where the checkpoint asks for it. InvalidArgument for models with an encoder, with K and V in one
    plane, or with recurrent states."""
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise InvalidArgument(f"kv_cache_dtype is {kv_cache_dtype!r}; it must be one of {', '.join(KV_CACHE_DTYPES)}")
    fp8 = kv_cache_dtype == "fp8_e4m3" or model.quantization.fp8_kv
    if fp8 and model.compressed is not None:
        raise InvalidArgument(
            f"kv_cache_dtype is {kv_cache_dtype!r}, which means 8 bits for this checkpoint; {model.architecture} keeps "
            "K and V in one plane, which is stored as it is computed"
        )
    if fp8 and model.encoder is not None:
        raise InvalidArgument(
            f"kv_cache_dtype is {kv_cache_dtype!r}, which means 8 bits for this checkpoint; {model.architecture} has "
            "an encoder, whose K and V are stored as they are computed"
        )
    if fp8 and model.recurrent is not None:
        raise InvalidArgument(
            f"kv_cache_dtype is {kv_cache_dtype!r}, which means 8 bits for this checkpoint; {model.architecture} "
            "keeps recurrent states, which are stored in float32: set auto, and give a checkpoint that asks for no 8 "
            "bits"
        )
    return fp8


def choose_scales(config: WorkerConfig, model: ModelConfig, drafter: ModelConfig | None = None) -> KVScales | None:
    """None where K and V are stored as they are computed. Scales in `config` go before the
    checkpoint's; 1 where neither has any, and for a layer of the checkpoint that drafts. drafter: its layers follow; it
    stores as `model` does."""
    if not stores_fp8(config.kv_cache_dtype, model):
        return None
    own = _scales_of(config, config.model_path, model)
    if drafter is None:
        return own
    if config.speculation.draft:
        behind = _scales_of(config, config.speculation.draft, drafter)
    else:
        behind = KVScales.uniform(drafter.num_layers, config.k_scale or 1.0, config.v_scale or 1.0)
    return KVScales(own.k + behind.k, own.v + behind.v)


def _scales_of(config: WorkerConfig, folder: str, model: ModelConfig) -> KVScales:
    if model.latent is not None:
        return _without_scales(config, model)
    stored = None
    if config.load_format == "safetensors" and None in (config.k_scale, config.v_scale):
        stored = read_scales(weight_files(Path(folder)), model)
    given = KVScales.uniform(model.num_layers, config.k_scale or 1.0, config.v_scale or 1.0)
    if stored is None:
        return given
    return KVScales(given.k if config.k_scale else stored.k, given.v if config.v_scale else stored.v)


def _without_scales(config: WorkerConfig, model: ModelConfig) -> KVScales:
    """Refuses scales for latents and index keys, whose entries carry their own."""
    for name, scale in (("k_scale", config.k_scale), ("v_scale", config.v_scale)):
        if scale is not None:
            raise InvalidArgument(
                f"{name} is {scale:g}; {model.architecture} keeps latents, which carry scales of their own: set null"
            )
    return KVScales.uniform(model.num_layers)
