"""Options that each gRPC server here grants its callers, beyond gRPC's own defaults."""

UNANSWERED_CALLS = 1 << 14  # that a server has yet to look at, about 9 KB each; gRPC cancels calls beyond, unexplained
UNSEEN_SECONDS = 24 * 3600  # that a call may wait for the server; after 30 s gRPC would cancel it, unexplained
PING_MS = 5000  # between a caller's pings: many send one each 10 s; a third one that comes sooner ends the connection


def lenient_options() -> tuple[tuple[str, int], ...]:
    """gRPC would cancel some of 1,000 calls that come at once, and take pings more often than each 5 minutes for abuse.

    Its own limits stand after those of the servers, which answer calls beyond with a reason and an advice.
    """
    return (
        ("grpc.server.max_pending_requests", UNANSWERED_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", UNANSWERED_CALLS),
        ("grpc.server_max_unrequested_time_in_server", UNSEEN_SECONDS),
        ("grpc.http2.min_ping_interval_without_data_ms", PING_MS),
        ("grpc.keepalive_permit_without_calls", 1),
    )
