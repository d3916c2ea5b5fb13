"""gRPC between Baton's processes: identities, channels and servers."""

import os
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from runtime.addresses import bare, bracketed, is_any, is_loopback
from runtime.malformed import MalformedInterceptor, check_answers

MAX_MESSAGE_BYTES = 64 << 20  # a million-token prompt in one message is 5 MB
KEEPALIVE_MS = 20_000
MAX_WATCHES = 100  # of Health/Watch in one connection: they last as long as it does
STOP_GRACE_S = 2.0  # for running calls when a server stops
FIELD_AT_FAULT = "baton-field"  # trailing metadata of INVALID_ARGUMENT: the message field that is wrong
PARAM_AT_FAULT = "baton-param"  # beside it: the client's field, if the grammar names it; else empty
REFUSED_FOR = "baton-refused-for"  # trailing metadata of a worker's RESOURCE_EXHAUSTED, not of gRPC's own
NO_ROOM, GRAMMAR_BUSY, NO_ADAPTER, NO_SLOT, OVER_GOAL, RESTORING = "room", "grammar", "adapter", "slot", "goal", "kv"
OWN_ADDRESS = "auto"  # as --advertise-host

_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # the timeout that keepalive pings actually use; default: a minute
    ("grpc.dns_min_time_between_resolutions_ms", 1000),  # default: 30 s, in which a moved peer is not found
    ("grpc.keepalive_permit_without_calls", 1),
)
_NOT_SERVING = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.NOT_SERVING)
_TLS_SIGNS = ("handshake failed", "SSL", "Hostname Verification")  # substrings of gRPC's messages


class OpenChannel(Protocol):
    """`open_channel` with this process's credentials."""

    def __call__(self, address: str, server_name: str = "") -> grpc.aio.Channel: ...


REVISION_CHARS = 12  # of a fingerprint, where a revision has no name
MAX_PAUSE_S = 3600.0  # of a worker, until it goes on by itself


def new_incarnation() -> str:
    """A name for this run of this process, unique among all runs."""
    return secrets.token_hex(8)


def host_identity() -> str:
    """Equal for processes that can open each other's /proc files: boot id and PID namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not boot.exists():  # not Linux: no /proc to share either
        return f"{socket.gethostname()}:{os.getpid()}"
    return f"{boot.read_text().strip()}:{Path('/proc/self/ns/pid').readlink()}"


def own_address() -> str:
    """The address from which this host reaches others, by its routes, else by its own name. Raises OSError."""
    for family, elsewhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):  # which nothing has
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as link:
            link.connect((elsewhere, 9))  # sends nothing
            return str(link.getsockname()[0])
    with suppress(OSError):
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None)}
        if reachable := sorted(address for address in found if not is_loopback(address)):
            return reachable[0]
    raise OSError("this host has no address that others reach: set --advertise-host to one, or to a name")


def open_channel(
    address: str, server_name: str = "", dns_server: str = "", credentials: grpc.ChannelCredentials | None = None
) -> grpc.aio.Channel:
    """A channel to a worker, host:port. Reconnects by itself, at least every 0.25 s.

    `server_name`: the host that its certificate must name, if not that of the address. `dns_server`: host:port of the
    server that resolves the address; empty: the system's. Processes open channels through `runtime.trust`, which adds
    credentials.
    """
    target = f"dns://{dns_server}/{address}"  # a peer's address must not name a file or another scheme
    options = (
        *((("grpc.ssl_target_name_override", server_name),) if server_name else ()),
        *_OPTIONS,
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 250),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
    )
    if credentials is None:
        channel = grpc.aio.insecure_channel(target, options=options)
    else:
        channel = grpc.aio.secure_channel(target, credentials, options=options)
    check_answers(channel)
    return channel


def find_distrust(error: grpc.aio.AioRpcError) -> str | None:
    """Whether a call failed for mismatched certificates or secrets: the cause and remedy; None for other causes."""
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        return f"it refuses our calls, {error.details()}: give all processes the same BATON_FLEET_SECRET"
    details = error.details() or ""
    if error.code() is not grpc.StatusCode.UNAVAILABLE or not any(sign in details for sign in _TLS_SIGNS):
        return None
    if "WRONG_VERSION_NUMBER" in details:
        return "it does not speak TLS: start all processes with --tls-dir, or none"
    if "Hostname Verification" in details:
        return "its certificate does not name this address: make one with `baton certs --host`"
    _, _, reason = details.partition("CERTIFICATE_VERIFY_FAILED: ")
    return f"no certificate of our authority ({reason.removesuffix(': OK') or details}): use the same --tls-dir"


def build_server(
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    max_request_bytes: int = MAX_MESSAGE_BYTES,
    more_options: Sequence[tuple[str, int]] = (),
) -> grpc.aio.Server:
    """A server with matching limits: add services, `bind`, `start`. Larger requests get RESOURCE_EXHAUSTED, unread."""
    options = (
        *_OPTIONS,
        *more_options,
        ("grpc.max_receive_message_length", max_request_bytes),
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", 0),
    )
    if not any(isinstance(one, MalformedInterceptor) for one in interceptors):
        interceptors = (*interceptors, MalformedInterceptor())
    return grpc.aio.server(options=options, interceptors=interceptors)


def bind(server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None = None) -> int:
    """Bind a port (0: any free one) before serving. Returns the port. Raises OSError."""
    address = f"{bracketed(host)}:{port}"
    try:
        return server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}: is the port taken? Choose another --port") from error


def listen_tcp(host: str, port: int, flag: str = "--port") -> socket.socket:
    """A listening socket, for servers other than gRPC's. Raises OSError that says what to do with `flag`."""
    try:
        return open_listener(host, port)
    except OSError as error:
        address = f"{bracketed(host)}:{port}"
        raise OSError(f"cannot listen on {address}: {error.strerror}; choose another {flag}") from error


def open_listener(host: str, port: int) -> socket.socket:
    """Like `listen_tcp`, with the system's OSError. All IPv6 interfaces include all IPv4 ones, as in gRPC."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    is_dual = family is socket.AF_INET6 and is_any(host) and socket.has_dualstack_ipv6()
    return socket.create_server((bare(host), port), family=family, backlog=2048, dualstack_ipv6=is_dual)


class _Health(health.aio.HealthServicer):  # type: ignore[misc]  # untyped
    """`Check` also answers NOT_SERVING to trouble that comes without an event, such as a step that hangs."""

    def __init__(self, find_trouble: Callable[[], str | None]) -> None:
        super().__init__()
        self._find_trouble = find_trouble
        self._num_watches: Counter[str] = Counter()  # peer, which is one connection |-> its Watch calls

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> health_pb2.HealthCheckResponse:
        answer = await super().Check(request, context)
        return _NOT_SERVING if self._find_trouble() else answer

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:  # noqa: N802
        peer = context.peer()
        if self._num_watches[peer] >= MAX_WATCHES:
            detail = f"this connection has {MAX_WATCHES} Watch calls already, the most that it may have"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, detail)
        self._num_watches[peer] += 1
        try:
            await super().Watch(request, context)
        finally:
            self._num_watches -= Counter((peer,))  # keeps no zeros


async def start(
    server: grpc.aio.Server, find_trouble: Callable[[], str | None] = lambda: None
) -> health.aio.HealthServicer:
    """Serve, and report SERVING through the standard health service until its `enter_graceful_shutdown`.

    `find_trouble`: why this process takes no requests; `Check` then answers NOT_SERVING as well.
    """
    servicer = _Health(find_trouble)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    await server.start()
    return servicer
