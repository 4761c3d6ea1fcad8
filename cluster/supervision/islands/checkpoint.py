"""Checks a checkpoint's whole configuration and its headers before any process starts."""

from dataclasses import replace
from pathlib import Path

from tandem.cache.kernels.flashinfer.served_version import refused_version
from tandem.cache.kinds.kind import check_gpu
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.layout import KVLayout
from tandem.cluster.config.cluster_config import ClusterConfig
from tandem.cluster.config.rank_shapes import check_ranks
from tandem.cluster.errors import ConfigError, StartFailed
from tandem.cluster.requests.default_sampling import default_sampling
from tandem.cluster.requests.embedding.recipe import read_recipe
from tandem.cluster.supervision.process_settings import agreed_pages, check_memory, check_snapshots, worker_configs
from tandem.cluster.text.tokenizer import Tokenizer
from tandem.workers.checkpoint.errors import ModelError
from tandem.workers.config import WorkerConfig
from tandem.workers.models.blocks.adapted_products import check_adaptable
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.drafters.drafter_config import load_drafter_config
from tandem.workers.models.drafters.load import check_drafter_weights
from tandem.workers.models.kv_scales import choose_scales
from tandem.workers.models.registry import load_config
from tandem.workers.models.weights import check_weights
from tandem.workers.runner.model_cache import kv_layout


def check_model(config: ClusterConfig) -> int:
    """Returns max_model_len. ConfigError for a wrong checkpoint, before any process starts."""
    folder = Path(config.model.path or "")
    try:
        model = load_config(folder, config.model.dtype)
        if config.model.load_format == "safetensors":
            check_weights(folder, model)
        tokenizer = Tokenizer.from_folder(folder)
        worker = worker_configs(config, model.max_length)[0]
        drafter = _check_drafter(worker, model, tokenizer)
        _check_adaptable(config, model)
        check_ranks(config.island, (model, drafter))
        layout = kv_layout(model, worker.page_size, choose_scales(worker, model, drafter), drafter)
        check_snapshots(worker, layout)
        default_sampling(folder, config.model.generation_config)
        read_recipe(folder)
    except ModelError as error:
        raise ConfigError(f"model.path: {error}") from error
    except InvalidArgument as error:
        raise ConfigError(f"cache.{error}") from error
    if config.island.device == "cuda":
        _check_gpu(layout, model if model.latent or drafter is None else drafter)
    max_model_len = config.model.max_model_len or model.max_length
    if max_model_len > model.max_length:
        raise ConfigError(f"model.max_model_len is {max_model_len}; the checkpoint takes at most {model.max_length}")
    if config.island.device == "cpu":
        worker = replace(worker, max_model_len=max_model_len)
        check_memory(worker, layout, agreed_pages(config, (), max_model_len))
    return max_model_len


def _check_adaptable(config: ClusterConfig, model: ModelConfig) -> None:
    """Raises ConfigError for adapters of a model that adapters cannot change."""
    try:
        check_adaptable(model, config.adapters.max_resident)
    except ModelError as error:
        raise ConfigError(str(error)) from error


def _check_drafter(worker: WorkerConfig, model: ModelConfig, tokenizer: Tokenizer | None) -> ModelConfig | None:
    """Returns the config of the model that drafts for `model`, whose tokenizer is given; None without one. ConfigError
    for a drafter that does not fit."""
    speculation, folder = worker.speculation, Path(worker.speculation.draft)
    try:
        drafter = load_drafter_config(speculation, model)
        if drafter is None:
            return None
        if worker.load_format == "safetensors":
            check_drafter_weights(Path(worker.model_path), speculation, model, drafter)
        if speculation.method != "draft_model":
            return drafter  # its tokens are the target's
        own = Tokenizer.from_folder(folder)
    except ModelError as error:
        raise ConfigError(f"speculation.{'draft' if speculation.draft else 'method'}: {error}") from error
    if tokenizer is not None and own is not None:
        if not own.agrees(tokenizer):
            raise ConfigError(f"speculation.draft is {folder}; it must be a model with the tokenizer of model.path")
    elif drafter.vocab_size != model.vocab_size:
        raise ConfigError(
            f"speculation.draft is {folder}, with a vocabulary of {drafter.vocab_size}; it must have that of "
            f"model.path, {model.vocab_size}, or tokenizers that show that both are alike"
        )
    return drafter


def _check_gpu(layout: KVLayout, model: ModelConfig) -> None:
    """Raises ConfigError unless the kernels of a GPU serve the cache of a layout. model: the model with latents, if
    any. StartFailed for an unsupported version of FlashInfer."""
    if reason := refused_version():
        raise StartFailed(reason)
    try:
        check_gpu(layout, None if model.latent is None else model.latent.heads)
    except InvalidArgument as error:
        raise ConfigError(f"island.device is cuda, which model.path and cache.page_size do not fit: {error}") from error
