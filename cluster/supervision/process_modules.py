"""The modules that a cluster's processes import. The fork server imports them before it forks."""

from tandem.cluster.config.cluster_config import ClusterConfig
from tandem.cluster.gateway.settings import READ_BY

WORKER = "tandem.cluster.supervision.worker_actor"
GATEWAY = "tandem.cluster.supervision.gateway_actor"
WORKER_MODULES = ("numpy.ma",)  # np.unique imports it when it is first called
GPU_MODULES = (
    *WORKER_MODULES,
    "tandem.transfer.nvshmem.transport",
    "tandem.cache.kernels.flashinfer.preload:preload_flashinfer",
    "tandem.cache.kernels.preload:preload_triton",
    "triton.compiler.code_generator",  # the first launch imports it
)
GATEWAY_MODULES = ("tandem.cluster.requests.reading.reader", *READ_BY)
HTTP_MODULES = (*GATEWAY_MODULES, "tandem.cluster.frontends.http.server")


def worker_modules(device: str) -> tuple[str, ...]:
    """Returns the modules that a worker loads besides its own."""
    return GPU_MODULES if device == "cuda" else WORKER_MODULES


def gateway_modules(has_http: bool) -> tuple[str, ...]:
    """Returns the modules that a gateway loads besides its own, with those of its processes that read long requests.
    has_http: whether it has an HTTP server, even one for metrics only."""
    return HTTP_MODULES if has_http else GATEWAY_MODULES


def process_modules(config: ClusterConfig) -> tuple[str, ...]:
    """Returns the modules of all processes on the launcher's host."""
    has_http = config.gateway.http_port is not None or config.metrics.port is not None
    return GATEWAY, *gateway_modules(has_http), WORKER, *worker_modules(config.island.device)
