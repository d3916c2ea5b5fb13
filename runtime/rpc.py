"""How Baton's processes speak gRPC to each other: identities, channels and servers.

Knows sockets and limits, nothing of what is said.
"""

import os
import secrets
import socket
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

MAX_MESSAGE_BYTES = 64 << 20  # a million-token prompt in one message is 5 MB
KEEPALIVE_MS = 20_000

_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
)


def new_incarnation() -> str:
    """A name for this run of this process that no other run has."""
    return secrets.token_hex(8)


def host_identity() -> str:
    """Equal for processes that can open each other's /proc files: boot id and PID namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not boot.exists():  # no Linux: no /proc to share either
        return f"{socket.gethostname()}:{os.getpid()}"
    return f"{boot.read_text().strip()}:{Path('/proc/self/ns/pid').readlink()}"


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel to a worker. Reconnects by itself, at the latest every 2 s."""
    options = (
        *_OPTIONS,
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2000),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
    )
    return grpc.aio.insecure_channel(address, options=options)


def build_server() -> grpc.aio.Server:
    """A server with matching limits; add services, then `listen`."""
    options = (
        *_OPTIONS,
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", 0),
    )
    return grpc.aio.server(options=options)


async def listen(server: grpc.aio.Server, host: str, port: int) -> int:
    """Bind, start and report SERVING by the standard health service. Returns the port."""
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error}; choose another --port") from error
    await server.start()
    await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    return bound
