"""Checks that workers of several ranks can divide a model."""

from collections.abc import Sequence

from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.shard import Shard
from tandem.cluster.config.island import IslandSection
from tandem.cluster.errors import ConfigError
from tandem.transfer.island_ranks import MAX_RANKS
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.sharding import shard_config


def check_ranks(island: IslandSection, models: Sequence[ModelConfig | None]) -> None:
    """Raises ConfigError, which says what would fit, unless the ranks of each role can divide the models. models: the
    served model and the drafting one."""
    for key in ("prefill_ranks", "decode_ranks"):
        ranks = getattr(island, key)
        if why := _refusal(ranks, models):
            fitting = [str(size) for size in range(1, MAX_RANKS + 1) if not _refusal(size, models)]
            raise ConfigError(f"island.{key} is {ranks}: {why}; {', '.join(fitting)} fit this model")


def _refusal(ranks: int, models: Sequence[ModelConfig | None]) -> str:
    """Returns why so many ranks cannot divide the models; empty if they can."""
    try:
        for model in models:
            if model is not None:
                shard_config(model, Shard(0, ranks))
    except InvalidArgument as error:
        return str(error)
    return ""
