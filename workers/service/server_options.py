"""How a worker's gRPC server treats its connections."""

from tandem.workers.config import WorkerConfig, max_message_bytes
from tandem.workers.ports.connections import lenient_options


def server_options(config: WorkerConfig) -> list[tuple[str, int]]:
    """A peer that hangs keeps its connection, so it is asked for a sign of life: without one its calls end as if it
    had gone, at the latest after a lease, or after two seconds where a lease is shorter. Between hosts silence may only
    mean that a link is down."""
    half_lease_ms, limit = max(1000, int(config.lease_seconds * 500)), max_message_bytes(config.max_model_len)
    silent_ms = max(half_lease_ms, int(config.silent_seconds * 1000))
    return [
        ("grpc.max_receive_message_length", limit),
        ("grpc.max_send_message_length", limit),
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_time_ms", half_lease_ms),
        ("grpc.keepalive_timeout_ms", silent_ms),
        ("grpc.http2.ping_timeout_ms", silent_ms),  # 60 s by default, and it is the one that ends a connection
        ("grpc.http2.max_pings_without_data", 0),
        *lenient_options(),
    ]
