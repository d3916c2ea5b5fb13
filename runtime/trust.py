"""Trust between processes: certificates of one authority, or a secret shared by the whole fleet."""

import hmac
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import prometheus_client
import structlog
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from runtime import rpc
from runtime.config_parts import ProcessConfig
from runtime.logs import tap_native_stderr
from runtime.malformed import METHOD_KINDS
from runtime.settings import ConfigError

log = structlog.get_logger()

SECRET_KEY = "baton-fleet-secret"  # metadata of every call between processes
OPEN_SERVICE = "/grpc.health.v1.Health/"  # health probes do not know the secret
TLS_FILES = ("ca.pem", "cert.pem", "key.pem")
_HANDSHAKE_FAILED = "Handshake failed with error "  # in gRPC's log


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The content of --tls-dir, in PEM."""

    ca: bytes  # must have signed the other side's certificate
    cert: bytes  # ours
    key: bytes = field(repr=False)


class Refusals:
    """Rejected peers: all are counted, and each reason is logged the 1st, 2nd, 4th, 8th ... time."""

    def __init__(self) -> None:
        text = "Calls without the fleet secret, and failed TLS handshakes: with peers that call us or that we call"
        self.metric = prometheus_client.Counter("baton:peers_refused", text, ["by"], registry=None)
        for by in ("secret", "tls"):
            self.metric.labels(by)
        self._seen: Counter[str] = Counter()  # reason |-> count

    def count(self, by: str, event: str, **facts: str) -> None:
        """Count one rejection, `by` "secret" or "tls"."""
        self.metric.labels(by).inc()
        reason = event + facts.get("reason", "")
        self._seen[reason] += 1
        if self._seen[reason].bit_count() == 1:
            log.warning(event, **facts, refused=self._seen[reason])

    def take_line(self, line: str) -> bool:
        """Whether this is gRPC's log line of a failed handshake; if so, count it."""
        _, sign, error = line.partition(_HANDSHAKE_FAILED)
        if sign:
            self.count("tls", "TLS handshake failed", reason=error.rpartition("OPENSSL_internal:")[2][:200])
        return bool(sign)


@dataclass(frozen=True, slots=True)
class Trust:
    """How this process authenticates itself to its fleet, and what it requires of others. Default: nothing."""

    tls: TlsFiles | None = None
    secret: str = field(default="", repr=False)
    refusals: Refusals = field(default_factory=Refusals, repr=False, compare=False)

    def find_weaknesses(self) -> dict[str, str]:
        """Weaknesses that a user should know of: event for the log |-> reason."""
        if self.tls is not None or self.secret:
            return {}
        reason = (
            "any user of this machine can drain it and read the KV of prompts: set the same BATON_FLEET_SECRET in all"
        )
        return {"no fleet secret": reason}

    def watch_handshakes(self) -> None:
        """Count and explain failed TLS handshakes from now on. gRPC reports each only in its log."""
        if self.tls is not None:
            tap_native_stderr(self.refusals.take_line)

    def open_channel(self, address: str, server_name: str = "", dns_server: str = "") -> grpc.aio.Channel:
        """A channel whose calls carry the secret; the certificate must name `server_name`, or the address's host."""
        credentials = None
        if self.tls is not None:
            credentials = grpc.ssl_channel_credentials(self.tls.ca, self.tls.key, self.tls.cert)
        channel = rpc.open_channel(address, server_name, dns_server, credentials)
        # Not done with interceptors, which change how cancellation propagates.
        for kind in METHOD_KINDS if self.secret else ():
            setattr(channel, kind, _with_metadata(getattr(channel, kind), ((SECRET_KEY, self.secret),)))
        return channel

    def build_server(self) -> grpc.aio.Server:
        """A server that rejects calls without the secret."""
        return rpc.build_server([SecretInterceptor(self.secret, self.refusals)] if self.secret else [])

    def bind(self, server: grpc.aio.Server, host: str, port: int) -> int:
        """Bind a port that accepts only certificates of our authority. Returns the port. Raises OSError."""
        credentials = None
        if self.tls is not None:
            pair = (self.tls.key, self.tls.cert)
            credentials = grpc.ssl_server_credentials([pair], self.tls.ca, require_client_auth=True)
        return rpc.bind(server, host, port, credentials)


def load_trust(config: ProcessConfig) -> Trust:
    """Trust as configured. Raises ConfigError that says what to do if the files cannot be used."""
    if not config.tls_dir:
        return Trust(secret=config.fleet_secret)
    folder = Path(config.tls_dir)
    try:
        files = TlsFiles(*((folder / name).read_bytes() for name in TLS_FILES))
    except OSError as error:
        raise ConfigError(
            f"--tls-dir {folder} needs {', '.join(TLS_FILES)}, such as `baton certs` makes: {error}"
        ) from error
    problem = find_problem(files, datetime.now(UTC))
    if problem is not None:
        raise ConfigError(f"--tls-dir {folder} cannot be used: {problem}; `baton certs` makes new ones")
    return Trust(files, config.fleet_secret)


def find_problem(files: TlsFiles, now: datetime) -> str | None:
    """Why peers would reject this certificate at `now`; None if it is good."""
    try:
        authority, own = x509.load_pem_x509_certificate(files.ca), x509.load_pem_x509_certificate(files.cert)
        if load_pem_private_key(files.key, None).public_key() != own.public_key():
            return "key.pem does not belong to cert.pem"
        own.verify_directly_issued_by(authority)
    except InvalidSignature:
        return "cert.pem was not signed by ca.pem"
    except (ValueError, TypeError) as error:
        return f"it has no valid PEM certificate and unencrypted key, or ca.pem did not sign cert.pem ({error})"
    for name, one in (("cert.pem", own), ("ca.pem", authority)):
        if not one.not_valid_before_utc <= now <= one.not_valid_after_utc:
            return f"{name} is valid from {one.not_valid_before_utc:%F %R} to {one.not_valid_after_utc:%F %R} UTC only"
    return None


class SecretInterceptor(grpc.aio.ServerInterceptor):
    """Accepts calls with the secret, and health probes. Compares in constant time."""

    def __init__(self, secret: str, refusals: Refusals) -> None:
        self._secret = secret.encode()
        self._refusals = refusals

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        metadata = handler_call_details.invocation_metadata or ()
        given = next((value for key, value in metadata if key == SECRET_KEY), "")
        is_known = hmac.compare_digest(given if isinstance(given, bytes) else given.encode(), self._secret)
        if is_known or handler_call_details.method.startswith(OPEN_SERVICE):
            return await continuation(handler_call_details)
        fault = "with a wrong fleet secret" if given else "without the fleet secret"
        return grpc.stream_stream_rpc_method_handler(partial(self._refuse, fault))  # works for any kind of method

    async def _refuse(
        self, fault: str, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        self._refusals.count("secret", f"call {fault} refused", peer=context.peer())
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, fault)


def _with_metadata(open_method: Callable[..., Any], metadata: tuple[tuple[str, str], ...]) -> Callable[..., Any]:
    return lambda *args, **options: partial(open_method(*args, **options), metadata=metadata)
