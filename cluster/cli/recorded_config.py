"""Checks the worker configuration in a record's header by the rules of a cluster's configuration."""

from typing import Any

from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.errors import ConfigError
from tandem.cluster.supervision.process_settings import CACHE_KEYS
from tandem.workers.config import SpeculationSettings
from tandem.workers.replay.errors import NoReplay
from tandem.workers.replay.record_file import Header

KEYS = {  # of the cluster's configuration, by the field of WorkerConfig that has the value
    "dtype": "model.dtype",
    "load_format": "model.load_format",
    "max_model_len": "model.max_model_len",
    **{name: f"cache.{name}" for name in CACHE_KEYS},
    "max_batch_tokens": "scheduler.max_batch_tokens",
    "max_sequences": "scheduler.max_sequences",
    "token_seconds": "scheduler.token_seconds",
    "transport": "island.transport",
    "num_signals": "island.num_signals",
    "lease_seconds": "island.lease_seconds",
    "verify_kv": "island.verify_kv",
    "threads": "island.threads_per_worker",
}


def check_recorded(header: Header) -> None:
    """Raises NoReplay for a value that no cluster's configuration may have. Its text names the key and the allowed
    values."""
    config = header.config
    keys: dict[str, Any] = {key: getattr(config, name) for name, key in KEYS.items()}
    keys["cache.num_pages"] = header.num_pages
    if config.decode_workers is not None:
        keys["island.num_decode"] = config.decode_workers
    if config.speculation != SpeculationSettings():
        keys |= {f"speculation.{name}": value for name, value in vars(config.speculation).items()}
        keys["speculation.draft"] = config.speculation.draft or None
    try:
        load_config(None, keys)
    except ConfigError as error:
        raise NoReplay(f"the configuration of the header is none of a cluster: {error}") from None
    if config.workers_on_host == 0:
        raise NoReplay("the configuration of the header has workers_on_host 0; it must be at least 1")
