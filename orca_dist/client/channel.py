"""How clients connect: limits and keepalive, the same for both kinds."""

from __future__ import annotations

MAX_MESSAGE_BYTES = 64 * 2**20
DEFAULT_ADDRESS = "127.0.0.1:50051"

OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),  # a connection for each client, never a shared one
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),  # finds a server whose machine is gone
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # also the longest wait for a silent port
    ("grpc.enable_http_proxy", 0),  # a serving cluster is not behind the way out
)
