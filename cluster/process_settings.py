"""What each process of a cluster is told, from the cluster's configuration."""

import os

from tandem.cluster.config import ClusterConfig
from tandem.cluster.gateway import GatewaySettings
from tandem.cluster.worker_link import WorkerAddress
from tandem.workers.config import Role, WorkerConfig

FIRST_EPOCH = 1


def worker_configs(config: ClusterConfig, max_model_len: int) -> list[WorkerConfig]:
    """One for each PE of the island, prefill workers first."""
    roles = [Role.PREFILL] * config.island.num_prefill + [Role.DECODE] * config.island.num_decode
    return [
        WorkerConfig(
            role=role,
            island=config.name,
            epoch=FIRST_EPOCH,
            pe=pe,
            num_pes=len(roles),
            model_path=config.model.path or "",
            dtype=config.model.dtype,
            device=config.island.device,
            load_format=config.model.load_format,
            max_model_len=max_model_len,
            page_size=config.cache.page_size,
            num_pages=config.cache.num_pages,
            prefix_sharing=config.cache.prefix_sharing,
            max_batch_tokens=config.scheduler.max_batch_tokens,
            max_sequences=config.scheduler.max_sequences,
            transport=config.island.transport,
            num_signals=config.island.num_signals,
            lease_seconds=config.island.lease_seconds,
            verify_kv=config.island.verify_kv,
            threads=threads_per_worker(config),
            max_stream_messages_per_second=config.scheduler.stream_messages_per_second,
        )
        for pe, role in enumerate(roles)
    ]


def threads_per_worker(config: ClusterConfig) -> int:
    """As configured, or an even share of this machine's cores: with more threads, workers wait for each other."""
    workers = config.island.num_prefill + config.island.num_decode
    return config.island.threads_per_worker or max(1, (os.cpu_count() or 1) // workers)


def gateway_settings(config: ClusterConfig, workers: tuple[WorkerAddress, ...], max_model_len: int) -> GatewaySettings:
    return GatewaySettings(
        cluster=config.name,
        island=config.name,
        epoch=FIRST_EPOCH,
        transport=config.island.transport,
        workers=workers,
        model_path=config.model.path or "",
        dtype=config.model.dtype,
        max_model_len=max_model_len,
        page_size=config.cache.page_size,
        num_pages=config.cache.num_pages,
        host=config.gateway.host,
        port=config.gateway.port,
        max_queued=config.gateway.max_queued,
        max_queued_tokens=config.gateway.max_queued_tokens,
        queue_seconds=config.gateway.queue_seconds,
        request_seconds=config.gateway.request_seconds,
        max_message_bytes=config.gateway.max_message_mib << 20,
    )
