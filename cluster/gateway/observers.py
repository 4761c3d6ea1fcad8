"""Reports a gateway process's requests: metrics, the access log, traces."""

from collections.abc import Callable

from tandem.cluster.config.cluster_config import ClusterConfig
from tandem.cluster.metrics.request_metrics import RequestMetrics
from tandem.cluster.requests.observer import Observe
from tandem.cluster.tracing.access_log import AccessLog
from tandem.cluster.tracing.exporter import otlp_exporter
from tandem.cluster.tracing.request_trace import Tracer


def open_tracer(config: ClusterConfig) -> tuple[Tracer, Callable[[], None]]:
    """Returns the tracer, and a call that ends its export, which may take seconds."""
    section = config.tracing
    if section.endpoint is None:
        return Tracer(section.keep, 0.0), lambda: None
    export, end = otlp_exporter(section.endpoint, f"tandem/{config.name}")
    return Tracer(section.keep, section.sample_ratio, export), end


def observers_of(config: ClusterConfig, model: str, metrics: RequestMetrics, tracer: Tracer) -> list[Observe]:
    """Makes the observers that the configuration asks for. model: what the access log names without an adapter."""
    observers: list[Observe] = []
    if config.metrics.enabled:
        observers.append(metrics.observe)
    if config.logging.access:
        observers.append(AccessLog(model).observe)
    if config.tracing.keep or config.tracing.endpoint is not None:
        observers.append(tracer.observe)
    return observers
