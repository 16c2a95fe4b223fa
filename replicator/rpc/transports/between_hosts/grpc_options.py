"""Options of gRPC: nothing large before a handshake, and dead peers are noticed."""

from replicator.rpc.transports.between_hosts.chunk_queues import CHUNK_BYTES

MAX_CONNECTIONS = 256
"""Streams of one listener; one more is turned away."""

_COMMON_OPTIONS = (
    ("grpc.max_receive_message_length", CHUNK_BYTES),
    ("grpc.max_metadata_size", 8 << 10),
    ("grpc.absolute_max_metadata_size", 16 << 10),
    # A stopped peer is noticed in 3.5 s: 1 of silence, then 2.5 for a ping.
    ("grpc.keepalive_time_ms", 1_000),
    ("grpc.keepalive_timeout_ms", 2_500),
    ("grpc.http2.ping_timeout_ms", 2_500),
    ("grpc.http2.max_pings_without_data", 0),
    # What arrives is taken as it is: nothing small unfolds into something large.
    ("grpc.per_message_compression", 0),
    ("grpc.per_message_decompression", 0),
)
SERVER_OPTIONS = (
    *_COMMON_OPTIONS,
    ("grpc.so_reuseport", 0),
    ("grpc.max_concurrent_streams", 8),
    ("grpc.max_allowed_incoming_connections", 2 * MAX_CONNECTIONS),
    ("grpc.server_handshake_timeout_ms", 5_000),
    ("grpc.max_connection_idle_ms", 30_000),
    # Frequent pings of clients are not an attack.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
)
CLIENT_OPTIONS = (
    *_COMMON_OPTIONS,
    ("grpc.enable_http_proxy", 0),  # no environment variable may redirect calls
    ("grpc.enable_retries", 0),  # to send again is for the courier to decide
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.use_local_subchannel_pool", 1),
)
